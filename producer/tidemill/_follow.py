"""Following a token log: which chunks are new, and when the log must be read again.

Pub/sub only accelerates; the log is the truth.  A follower takes messages of the job's channel and
pages of its log in any order, and gives out each token once and in order.  It does no I/O: whoever
drives it reads ``next_read()`` while ``must_read`` says so, and waits for messages otherwise.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tidemill._choice_walk import ChoiceWalk
from tidemill._reads import SEAL, LogEntry, LogPage, Outcome, Read, log_page, outcome
from tidemill.protocol.codec import decode
from tidemill.protocol.errors import InvalidRequest, ProtocolError, StreamGap
from tidemill.protocol.keys import ShardKeys, keys_of
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import ChoiceOutput, JobEnd, JobResult, TokenChunk
from tidemill.result import not_found, result_expired

_EVENT_ID = re.compile(r"(\d{1,16})-(\d{1,10})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a job's output and the text they add.

    ``event_id`` resumes the stream after this chunk.  ``text`` may lag behind ``ids``, so the last
    chunk of a stream can have text without ids.  ``logprobs`` has one entry per id of a job that
    asked for them.  A chunk is of one ``choice``, one of the outputs of a job that asked for
    several; ``start`` and ``end`` count the tokens of all of them.
    """

    start: int
    end: int
    ids: tuple[int, ...]
    text: str
    event_id: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a token log: after ``num_tokens`` tokens, and after entry ``cursor`` if known."""

    num_tokens: int = 0
    cursor: str = ""

    @property
    def is_end(self) -> bool:
        """Whether everything, the terminal entry included, lies before it."""
        return self.cursor.startswith(f"{SEAL}-")


def parse_position(after: str | int) -> Position:
    """Read what a caller wants to resume after: an event id or a number of tokens."""
    if isinstance(after, int) and after >= 0:
        return Position(after)
    match = _EVENT_ID.fullmatch(after) if isinstance(after, str) else None
    if match is None:
        raise InvalidRequest(
            f"after: {str(after)[:40]!r} is neither an event id nor a number of tokens",
            field="after",
            fix="Use the event_id or the end of a chunk.",
        )
    return Position(int(match[2]), match[0])


class TokenFollower:
    """Where one reader is in one job's output; ``ready`` holds the chunks it has not taken yet.

    ``is_fresh`` says that the job was just submitted, so that a first look would be in vain.
    """

    def __init__(self, job_id: str, after: str | int = 0, *, is_fresh: bool = False) -> None:
        start = parse_position(after)
        self.job_id = job_id
        self.keys: ShardKeys = keys_of(job_id)
        self.position = start.num_tokens
        self.ready: deque[Chunk] = deque()
        self.end: JobEnd | None = None
        self.must_read = not is_fresh
        self._wants_tail = not start.is_end
        self._cursor = "" if start.is_end else start.cursor
        self._log_expired = False
        # A scan begins at the first entry. It alone may conclude that tokens are missing, and
        # it knows how many characters lie before each entry.
        self._scanned_chars: int | None = 0 if not self._cursor else None
        #: Characters before ``position``; None until a scan has passed it.
        self._num_chars: int | None = 0 if not self.position else None
        # Set once several choices were seen; who resumes does not know what was given of each.
        self._walk: ChoiceWalk | None = None
        self._may_walk = not self.position

    @property
    def channel(self) -> str:
        """The channel that repeats the log as it grows."""
        return self.keys.token_channel(self.job_id)

    def start_over(self) -> None:
        """Read anew the log of a job that the server had lost; what was given out is not again."""
        self._scan_again()

    @property
    def is_done(self) -> bool:
        """Whether the terminal entry was reached; ``ready`` may still hold chunks."""
        return self.end is not None

    def take_message(self, data: bytes) -> None:
        """Take one message of the channel, however late, repeated or out of order it comes."""
        if self.must_read:
            return  # the log is read after this message was published, so it has its tokens
        entry_id, _, body = data.partition(b" ")
        try:
            chunk = decode(body, TokenChunk)
        except ProtocolError:
            # The terminal message has no body. Anything else unreadable here does no harm
            # either: the log has what it stood for.
            self.must_read = True
            return
        told = _with_id(chunk, entry_id.decode())
        if self._is_walking(told):
            self._walk_message(told)
            return
        if chunk.end <= self.position:
            return
        if chunk.start != self.position:
            self.must_read = True
            return
        self._give(told)
        self._cursor = told.event_id

    def next_read(self) -> Read[LogPage | Outcome]:
        """What to read now."""
        if self._log_expired:
            return outcome(self.keys, self.job_id)
        return log_page(self.keys, self.job_id, self._cursor)

    def take_reply(self, reply: LogPage | Outcome) -> None:
        """Take the reply to ``next_read()``.

        Raises ``JobNotFound`` (``ResultExpired``); ``InvalidRequest`` if the reader wants to resume
        inside a chunk; ``StreamGap`` if the log lacks tokens.
        """
        if isinstance(reply, LogPage):
            self._take_page(reply)
        else:
            self._take_result(reply)

    def _take_page(self, page: LogPage) -> None:
        for entry in page.entries:
            if not self._take_entry(entry):
                self._scan_again()
                return
        self.must_read = not page.is_last
        if not page.is_last or self.is_done:
            return
        self._scanned_chars = None
        if page.state is None:
            raise not_found(self.job_id)
        if page.state.is_terminal:
            self._log_expired = self.must_read = True

    def _take_entry(self, entry: LogEntry) -> bool:
        entry_id, fields = entry
        chunk = _chunk_of(fields)
        if chunk is not None and not self._place(_with_id(chunk, entry_id)):
            return False
        self._cursor = entry_id
        if b"e" in fields:
            self.end = decode(fields[b"e"], JobEnd)
        return True

    def _take_result(self, stored: Outcome) -> None:
        if stored.result is None:
            raise result_expired(self.job_id)
        self._scan_again()
        chunks = list(stored_chunks(stored.result))
        if any(chunk.choice for chunk in chunks):
            self._begin_walk()
        for chunk in chunks:
            self._place(chunk)
        self.end = stored.result.end
        self.must_read = False

    def _scan_again(self) -> None:
        self._cursor, self._scanned_chars, self.must_read = "", 0, True
        if self._walk is not None:
            self._walk.start_over()

    def _is_walking(self, chunk: Chunk) -> bool:
        return self._walk is not None or (self._may_walk and chunk.choice > 0)

    def _begin_walk(self) -> None:
        if self._walk is None and self._may_walk:
            self._walk = ChoiceWalk(self.position, self._num_chars or 0)

    def _walk_message(self, chunk: Chunk) -> None:
        is_same_attempt = _fence_of(chunk.event_id) == _fence_of(self._cursor)
        if self._walk is None or not is_same_attempt or chunk.start > self._walk.passed:
            # Another attempt may have begun before the end of what was read of this one.
            self._begin_walk()
            self._scan_again()
        elif chunk.start == self._walk.passed:
            self._walk_on(self._walk, chunk)
            self._cursor = chunk.event_id

    def _walk_on(self, walk: ChoiceWalk, chunk: Chunk) -> None:
        num_ids, num_chars = walk.take(chunk)
        ids = chunk.ids[num_ids:]
        self._give(
            replace(
                chunk,
                start=self.position,
                end=self.position + len(ids),
                ids=ids,
                text=chunk.text[num_chars:],
                logprobs=logprobs_slice(chunk.logprobs, num_ids),
            )
        )

    def _place_by_choice(self, chunk: Chunk) -> bool:
        walk = self._walk
        if walk is None:
            self._begin_walk()
            return False
        if chunk.start != walk.passed:
            if self._scanned_chars is None:
                return False
            raise StreamGap(
                f"the log of {self.job_id} goes on with token {chunk.start} after token"
                f" {walk.passed}",
                job_id=self.job_id,
            )
        self._walk_on(walk, chunk)
        return True

    def _place(self, chunk: Chunk) -> bool:
        """Give out what is new in ``chunk``; false if only a scan can tell what is."""
        if self._is_walking(chunk):
            return self._place_by_choice(chunk)
        scanned = self._scanned_chars
        if scanned is not None:
            self._scanned_chars = scanned + len(chunk.text)
        if chunk.start == self.position:
            self._note_boundary(scanned)
            self._give(chunk)
        elif chunk.end > self.position:
            if scanned is None:
                return False
            self._give(self._cut(chunk, scanned))
        elif chunk.end == self.position:
            self._note_boundary(self._scanned_chars)
        return True

    def _note_boundary(self, scanned: int | None) -> None:
        if self._num_chars is None:
            self._num_chars = scanned

    def _cut(self, chunk: Chunk, scanned: int) -> Chunk:
        """Cut off what was given out already.

        A server that lost acknowledged writes gets them again with other boundaries between the
        entries; the characters given out so far tell where the text continues.
        """
        if chunk.start > self.position:
            raise StreamGap(
                f"the log of {self.job_id} lacks the tokens {self.position} to {chunk.start}",
                job_id=self.job_id,
            )
        if self._num_chars is None:
            raise InvalidRequest(
                f"after: token {self.position} is inside the chunk {chunk.start}-{chunk.end}",
                field="after",
                fix=f"Resume after {chunk.start} or {chunk.end}.",
            )
        return replace(
            chunk,
            start=self.position,
            ids=chunk.ids[self.position - chunk.start :],
            logprobs=logprobs_slice(chunk.logprobs, self.position - chunk.start),
            text=chunk.text[max(0, self._num_chars - scanned) :],
        )

    def _give(self, chunk: Chunk) -> None:
        if not chunk.ids and not (chunk.text and self._wants_tail):
            return
        self.ready.append(chunk)
        self.position = chunk.end
        if self._num_chars is not None:
            self._num_chars += len(chunk.text)


def stored_chunks(stored: JobResult) -> Iterator[Chunk]:
    """Cut a stored result at the boundaries that its log entries had.

    The fences of the entries are not stored; of an event id only the number of tokens counts then.
    """
    outputs = [ChoiceOutput(ids=stored.ids, text=stored.text, logprobs=stored.logprobs)]
    outputs += stored.others
    taken = [[0, 0] for _ in outputs]
    entries = _entries(stored, outputs)
    start = 0
    for index, (end, length, choice) in enumerate(entries, start=1):
        fence = SEAL if index == len(entries) else "0"
        output, (first, chars) = outputs[choice], taken[choice]
        last = first + end - start
        text = output.text[chars : chars + length]
        logprobs = logprobs_slice(output.logprobs, first, last)
        ids = output.ids[first:last]
        yield Chunk(start, end, ids, text, f"{fence}-{end}", logprobs, choice)
        start, taken[choice] = end, [last, chars + length]


def _entries(stored: JobResult, outputs: Sequence[ChoiceOutput]) -> list[tuple[int, int, int]]:
    # (end, number of characters, choice); what the boundaries leave out goes behind them.
    choices = stored.entry_choices or (0,) * len(stored.entries)
    entries = [(*entry, choice) for entry, choice in zip(stored.entries, choices, strict=True)]
    start = entries[-1][0] if entries else 0
    for choice, output in enumerate(outputs):
        told = sum(length for _, length, other in entries if other == choice)
        num_ids = _num_ids(entries, choice)
        if (num_ids, told) != (len(output.ids), len(output.text)) or not entries:
            start += len(output.ids) - num_ids
            entries.append((start, len(output.text) - told, choice))
    return entries


def _num_ids(entries: Sequence[tuple[int, int, int]], choice: int) -> int:
    starts = [0, *(end for end, _, _ in entries)]
    ends = zip(starts, entries, strict=False)
    return sum(end - start for start, (end, _, other) in ends if other == choice)


def logprobs_slice(
    logprobs: tuple[TokenLogprobs, ...] | None, start: int, end: int | None = None
) -> tuple[TokenLogprobs, ...] | None:
    """Return a part of logprobs, None if it has none."""
    return (logprobs or ())[start:end] or None


def _fence_of(event_id: str) -> str:
    return event_id.partition("-")[0]


def _chunk_of(fields: dict[bytes, bytes]) -> TokenChunk | None:
    """Read an entry's chunk; a claim marker has none, a terminal entry at least a position."""
    if b"d" in fields:
        return decode(fields[b"d"], TokenChunk)
    if b"e" in fields:
        position = int(fields[b"s"])
        return TokenChunk(start=position, end=position)
    return None


def _with_id(chunk: TokenChunk, event_id: str) -> Chunk:
    told = (chunk.logprobs, chunk.choice)
    return Chunk(chunk.start, chunk.end, chunk.ids, chunk.text, event_id, *told)
