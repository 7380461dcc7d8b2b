"""What one job has generated, and how much of it the token log holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import ChoiceOutput, JobEnd, JobResult, TokenChunk
from tidemill_gpuworker.engine.scored_prompt import ScoredPrompt

#: A chunk with logprobs of more tokens than this, alternatives among them, might outgrow the
#: bound on one message; each takes 15 bytes.
_MAX_CHUNK_LOGPROBS = 1 << 14


@dataclass(slots=True)
class _Tokens:
    """Tokens in order, and the text that became certain with each of them."""

    ids: list[int] = field(default_factory=list)
    # One entry per token, or none at all.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # The sum over an entry of the log is the entry's text.
    texts: list[str] = field(default_factory=list)

    def add(self, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        self.ids += ids
        self.logprobs += logprobs or ()
        self.texts += [""] * (len(ids) - 1) + [text]

    def take(self, num: int) -> "_Tokens":
        """Cut off the first ``num`` tokens and return them."""
        taken = _Tokens(self.ids[:num], self.logprobs[:num], self.texts[:num])
        del self.ids[:num], self.logprobs[:num], self.texts[:num]
        return taken


class TokenBuffer:
    """All output of one job over all its attempts.

        0 ............ num_written ............................. num_tokens
        [entry][entry][entry]      on their way | one queue per choice

    The log grows by whole chunks; a failover may take some of the last ones away again, and the
    reply to a write may be lost. ``move_to`` repairs both, so nothing is ever dropped from here.
    A token gets its place among those of all choices when the chunk with it is first made, and
    keeps it: a reader may have seen it there, whatever became of the reply.
    """

    def __init__(self, written: Sequence[TokenChunk] = ()) -> None:
        self._placed = _Tokens()
        # The choice of each token that has a place.
        self._choices: list[int] = []
        # Tokens without a place, by choice, the choice that has waited longest first.
        self._queues: dict[int, _Tokens] = {}
        self._loose_texts: dict[int, str] = {}
        self._boundaries: list[int] = []
        for chunk in written:
            self._placed.add(chunk.ids, chunk.text, chunk.logprobs)
            self._choices += [chunk.choice] * len(chunk.ids)
            self._boundaries.append(chunk.end)

    @property
    def ids(self) -> Sequence[int]:
        """All tokens of the first choice, those of earlier attempts first."""
        return self.choice(0).ids

    @property
    def num_tokens(self) -> int:
        """Tokens generated, of all choices."""
        return len(self._choices) + sum(len(queue.ids) for queue in self._queues.values())

    @property
    def num_written(self) -> int:
        """Tokens in the log."""
        return self._boundaries[-1] if self._boundaries else 0

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the log."""
        return self.num_tokens - self.num_written

    @property
    def num_waiting_choices(self) -> int:
        """How many choices have tokens that no chunk was made of yet."""
        return len(self._queues)

    def choice(self, number: int) -> ChoiceOutput:
        """What one choice has generated."""
        placed, queue = self._placed, self._queues.get(number, _Tokens())
        places = [place for place, choice in enumerate(self._choices) if choice == number]
        ids = [placed.ids[place] for place in places] + queue.ids
        texts = [placed.texts[place] for place in places] + queue.texts
        logprobs = [placed.logprobs[place] for place in places if placed.logprobs]
        # All of it was checked where it came in.
        return ChoiceOutput.model_construct(
            ids=tuple(ids),
            text="".join(texts) + self._loose_texts.get(number, ""),
            logprobs=tuple(logprobs + queue.logprobs) or None,
        )

    def add(
        self,
        ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None = None,
        choice: int = 0,
    ) -> None:
        """Append tokens of a choice and the text that became certain with them.

        Text without tokens was held back for some of the tokens before; it goes with the next one
        of its choice, or with the last chunk.
        """
        text = self._loose_texts.pop(choice, "") + text
        if ids:
            self._queues.setdefault(choice, _Tokens()).add(ids, text, logprobs)
        elif text:
            self._loose_texts[choice] = text

    def next_chunk(self, max_tokens: int) -> TokenChunk:
        """The next pending tokens, all of one choice and ``max_tokens`` at most.

        The very last chunk takes the text that was held back for its choice.
        """
        start = self.num_written
        choice = self._choice_at(start)
        end = self._run_end(start, start + max_tokens)
        if end == len(self._choices) and end - start < max_tokens:
            end = self._place(choice, max_tokens - (end - start))
        end = self._chunk_end(start, end)
        text = self._text(start, end)
        if end == self.num_tokens:
            text += self._loose_texts.get(choice, "")
        return TokenChunk(
            start=start,
            end=end,
            ids=tuple(self._placed.ids[start:end]),
            text=text,
            choice=choice,
            logprobs=tuple(self._placed.logprobs[start:end]) or None,
        )

    def acknowledge(self, end: int) -> None:
        """Note that the log now reaches ``end``, the end of the chunk that was made last."""
        while len(self._choices) < end:
            self._place(self._choice_at(len(self._choices)), end - len(self._choices))
        self._boundaries.append(end)

    def move_to(self, position: int) -> bool:
        """Note that the log holds ``position`` tokens, fewer or more than we thought.

        Returns False if it holds more than this job ever generated here: not our log any more.
        """
        if position > self.num_tokens:
            return False
        while self.num_written > position:
            self._boundaries.pop()
        while self.num_written < position:
            start = self.num_written
            choice = self._choice_at(start)
            end = self._run_end(start, position)
            if end == len(self._choices) < position:
                end = self._place(choice, position - end)
            self._boundaries.append(end)
        return True

    def result(
        self, end: JobEnd, last: TokenChunk, prompt: ScoredPrompt | None = None
    ) -> JobResult:
        """The stored result, given that ``last`` is the chunk that goes with the end."""
        first, *others = map(self.choice, range(max(1, len(end.choices))))
        spans = list(zip([0, *self._boundaries], self._boundaries, strict=False))
        entries = [(stop, len(self._text(start, stop))) for start, stop in spans]
        choices = [self._choices[start] for start, _ in spans]
        if last.ids or last.text:
            entries.append((last.end, len(last.text)))
            choices.append(last.choice)
        return JobResult(
            end=end,
            ids=first.ids,
            text=first.text,
            entries=tuple(entries),
            logprobs=first.logprobs,
            prompt_ids=prompt.ids if prompt else (),
            prompt_logprobs=prompt.logprobs if prompt else None,
            others=tuple(others),
            entry_choices=tuple(choices) if others else (),
        )

    def _choice_at(self, place: int) -> int:
        if place < len(self._choices):
            return self._choices[place]
        return next(iter(self._queues or self._loose_texts), 0)

    def _run_end(self, start: int, limit: int) -> int:
        # Where the tokens from ``start`` on stop being of one choice.
        end = min(limit, len(self._choices))
        runs = groupby(self._choices[start:end])
        return start + sum(1 for _ in next(runs, (0, iter(())))[1])

    def _place(self, choice: int, max_tokens: int) -> int:
        # Gives tokens that wait their places; returns the end of all places.
        queue = self._queues.get(choice)
        if queue is not None:
            taken = queue.take(max_tokens)
            self._placed.ids += taken.ids
            self._placed.logprobs += taken.logprobs
            self._placed.texts += taken.texts
            self._choices += [choice] * len(taken.ids)
            if not queue.ids:
                del self._queues[choice]
        return len(self._choices)

    def _chunk_end(self, start: int, end: int) -> int:
        total = 0
        for place, told in enumerate(self._placed.logprobs[start:end], start):
            total += 1 + len(told.top) + len(told.asked)
            if total > _MAX_CHUNK_LOGPROBS and place > start:
                return place
        return end

    def _text(self, start: int, end: int) -> str:
        return "".join(self._placed.texts[start:end])
