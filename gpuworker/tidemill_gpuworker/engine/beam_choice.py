"""Which beams go on, which are complete, and when no better one can come: pure decisions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill.protocol.logprobs import Alternative

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Beam:
    """A possible output: its tokens so far, and the sum of their logprobs."""

    ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Heir:
    """A beam that goes on: the number of the one before it, and the token that makes it longer."""

    parent: int
    beam: Beam


class BeamChoice:
    """vLLM's beam search, one step after the other.

    Of each beam the ``2 * width`` likeliest next tokens count.  Those that end the output make it
    complete, and of the others the ``width`` likeliest beams go on.  A beam is rated by the sum of
    its logprobs over its length to the power of ``length_penalty``, the length being that of prompt
    and output without an EOS token.
    """

    def __init__(
        self,
        width: int,
        *,
        prompt_len: int,
        max_tokens: int,
        eos_token_ids: Collection[int] = (),
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._width = width
        self._prompt_len = prompt_len
        self._max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._complete: list[Beam] = []
        self.beams: tuple[Beam, ...] = (Beam(),)
        #: Whether the search has ended.
        self.is_over = False

    def advance(self, rows: Sequence[Sequence[Alternative]]) -> list[Heir]:
        """Take the likeliest next tokens of each of ``beams``; returns who follows them.

        Equals keep the order of their parents, and then that of their tokens.
        """
        heirs: list[Heir] = []
        for parent, (beam, row) in enumerate(zip(self.beams, rows, strict=True)):
            for token_id, logprob in row[: 2 * self._width]:
                longer = Beam((*beam.ids, token_id), beam.logprob + logprob)
                if token_id in self._eos_token_ids:
                    self._complete.append(longer)
                else:
                    heirs.append(Heir(parent, longer))
        heirs.sort(key=lambda heir: -heir.beam.logprob)
        del heirs[self._width :]
        self.beams = tuple(heir.beam for heir in heirs)
        self._complete = sorted(self._complete, key=self.score, reverse=True)[: self._width]
        self._check_end()
        return [] if self.is_over else heirs

    def best(self, num: int) -> list[Beam]:
        """Return the best outputs once the search is over, the best first."""
        return sorted(self._complete, key=self.score, reverse=True)[:num]

    def score(self, beam: Beam) -> float:
        """Return what a beam is rated by."""
        has_eos = bool(beam.ids) and beam.ids[-1] in self._eos_token_ids
        return self._rate(beam, self._prompt_len + len(beam.ids) - has_eos)

    def _rate(self, beam: Beam, length: int) -> float:
        # Within MAX_LENGTH_PENALTY nothing overflows, and equals stay equal, as they would not
        # for the sake of a logarithm's rounding.
        return float(beam.logprob / max(1, length) ** self._length_penalty)

    def _check_end(self) -> None:
        if not self.beams:
            self.is_over = True
        elif len(self.beams[0].ids) >= self._max_tokens:
            self._complete += self.beams
            self.is_over = True
        elif len(self._complete) >= self._width:
            worst = self.score(self._complete[-1])
            self.is_over = self._early_stopping is True or worst >= self._highest_attainable()

    def _highest_attainable(self) -> float:
        # Logprobs only get less, but with a length penalty above 0 a longer beam may rate higher.
        best = self.beams[0]
        if self._early_stopping == "never" and self._length_penalty > 0:
            return self._rate(best, self._prompt_len + self._max_tokens)
        return self.score(best)
