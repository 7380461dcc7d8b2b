"""When a generation ends: stop tokens, stop strings, length."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended: ``stop``, ``length`` or ``repetition``.

    ``stop_reason`` is the stop string or the stop token id that ended it; None after an EOS token.
    """

    reason: FinishReason
    stop_reason: str | int | None = None


class StopChecker:
    """The checks that need token ids and counts only, in vLLM's order.

    ``max_output_tokens`` is what both ``max_tokens`` and the model's context allow.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_len: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._min_tokens = params.min_tokens
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        room = max_model_len - prompt_len
        self.max_output_tokens = room if params.max_tokens is None else min(room, params.max_tokens)

    def check_token(self, token_id: int, num_output_tokens: int) -> Finish | None:
        """Whether this token, number ``num_output_tokens`` of the output, is a stop."""
        if num_output_tokens < self._min_tokens:
            return None
        if token_id in self._eos_token_ids:
            return Finish(FinishReason.STOP)
        if token_id in self._stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
        return None

    def allows_stop_strings(self, num_output_tokens: int) -> bool:
        """Whether text that this many tokens bring may end the output; as in vLLM, one later."""
        return num_output_tokens > self._min_tokens

    def check_length(self, num_output_tokens: int, *, is_repetition: bool = False) -> Finish | None:
        """Whether there may be no further token, or should be none as it says the same again."""
        if num_output_tokens >= self.max_output_tokens:
            return Finish(FinishReason.LENGTH)
        if is_repetition and num_output_tokens >= self._min_tokens:
            return Finish(FinishReason.REPETITION)
        return None


@dataclass(frozen=True, slots=True)
class Released:
    """Text that is certain, and the stop string that ended it."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds stop strings across token borders.

        released text | held: could be the start of a stop string |  <- push

    Only such a beginning is held back, so at most the longest stop string less one character.
    Of several stop strings the one that is complete first ends the text, and the longer of two
    that end together: what is told never depends on where the tokens were cut.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._reach = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Released:
        """Take new text; unless ``may_stop``, a stop string that is complete in it is ignored."""
        if not self._stops:
            return Released(text)
        whole = self._held + text
        match = self._first_match(whole, len(self._held)) if may_stop else None
        if match is not None:
            self._held = ""
            start, stop = match
            return Released(whole[: start + len(stop) if self._include else start], stop)
        split = self._beginning_of_a_stop(whole)
        self._held = whole[split:]
        return Released(whole[:split])

    def flush(self) -> str:
        """Return what is held back; no stop string can come about any more."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, whole: str, num_searched: int) -> tuple[int, str] | None:
        # Matches that end within the first num_searched characters were found, or ignored, before.
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = whole.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _beginning_of_a_stop(self, whole: str) -> int:
        for start in range(max(0, len(whole) - self._reach), len(whole)):
            tail = whole[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(whole)
