"""What one job has generated, and how much of it the token log holds."""

from collections.abc import Sequence

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd, JobResult, TokenChunk
from tidemill_gpuworker.scored_prompt import ScoredPrompt

#: A chunk with logprobs of more tokens than this, alternatives among them, might outgrow the
#: bound on one message; each takes 15 bytes.
_MAX_CHUNK_LOGPROBS = 1 << 14


class TokenBuffer:
    """All output of one job over all its attempts.

        0 ............ num_written ............ num_tokens
        [entry][entry][entry]      pending

    The log grows by whole chunks; a failover may take some of the last ones away again, and the
    reply to a write may be lost. ``move_to`` repairs both, so nothing is ever dropped from here.
    """

    def __init__(self, written: Sequence[TokenChunk] = ()) -> None:
        self._ids: list[int] = []
        # One entry per token, or none at all.
        self._logprobs: list[TokenLogprobs] = []
        # Text that became certain with each token; the sum over an entry is the entry's text.
        self._texts: list[str] = []
        self._loose_text = ""
        self._boundaries: list[int] = []
        for chunk in written:
            self._ids += chunk.ids
            self._logprobs += chunk.logprobs or ()
            self._texts += [""] * (len(chunk.ids) - 1) + [chunk.text]
            self._boundaries.append(chunk.end)

    @property
    def ids(self) -> Sequence[int]:
        """All tokens, those of earlier attempts first."""
        return self._ids

    @property
    def num_chars(self) -> int:
        """Length of the text of all tokens."""
        return sum(map(len, self._texts)) + len(self._loose_text)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return len(self._ids)

    @property
    def num_written(self) -> int:
        """Tokens in the log."""
        return self._boundaries[-1] if self._boundaries else 0

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the log."""
        return self.num_tokens - self.num_written

    def add(
        self, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None = None
    ) -> None:
        """Append tokens and the text that became certain with them.

        Text without tokens was held back for some of the tokens before; it goes with the next one,
        or with the last chunk.
        """
        self._loose_text += text
        if ids:
            self._ids += ids
            self._logprobs += logprobs or ()
            self._texts += [""] * (len(ids) - 1) + [self._loose_text]
            self._loose_text = ""

    def next_chunk(self, max_tokens: int) -> TokenChunk:
        """The first ``max_tokens`` pending tokens; the very last chunk takes the held-back text."""
        start = self.num_written
        end = self._chunk_end(start, min(start + max_tokens, self.num_tokens))
        text = self._text(start, end)
        if end == self.num_tokens:
            text += self._loose_text
        return TokenChunk(
            start=start,
            end=end,
            ids=tuple(self._ids[start:end]),
            text=text,
            logprobs=tuple(self._logprobs[start:end]) or None,
        )

    def acknowledge(self, end: int) -> None:
        """Note that the log now reaches ``end``."""
        self._boundaries.append(end)

    def move_to(self, position: int) -> bool:
        """Note that the log holds ``position`` tokens, fewer or more than we thought.

        Returns False if it holds more than this job ever generated here: not our log any more.
        """
        if position > self.num_tokens:
            return False
        while self.num_written > position:
            self._boundaries.pop()
        if self.num_written < position:
            self._boundaries.append(position)
        return True

    def result(
        self, end: JobEnd, last: TokenChunk, prompt: ScoredPrompt | None = None
    ) -> JobResult:
        """The stored result, given that ``last`` is the chunk that goes with the end."""
        entries = [(stop, len(self._text(start, stop))) for start, stop in self._spans()]
        if last.ids or last.text:
            entries.append((last.end, len(last.text)))
        text = self._text(0, self.num_tokens) + self._loose_text
        return JobResult(
            end=end,
            ids=tuple(self._ids),
            text=text,
            entries=tuple(entries),
            logprobs=tuple(self._logprobs) or None,
            prompt_ids=prompt.ids if prompt else (),
            prompt_logprobs=prompt.logprobs if prompt else None,
        )

    def _chunk_end(self, start: int, end: int) -> int:
        total = 0
        for place, told in enumerate(self._logprobs[start:end], start):
            total += 1 + len(told.top) + len(told.asked)
            if total > _MAX_CHUNK_LOGPROBS and place > start:
                return place
        return end

    def _text(self, start: int, end: int) -> str:
        return "".join(self._texts[start:end])

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip([0, *self._boundaries], self._boundaries, strict=False))
