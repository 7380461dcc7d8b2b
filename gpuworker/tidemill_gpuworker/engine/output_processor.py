"""The output of one sequence: ids in, certain text and the end out."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.detokenizer import Detokenizer
from tidemill_gpuworker.engine.repetition import RepetitionDetector
from tidemill_gpuworker.engine.stop_checker import Finish, Released, StopChecker, StopStrings


@dataclass(frozen=True, slots=True)
class Output:
    """Text that is certain now and not told before; ``finish`` is set once the sequence ended."""

    text: str
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """Text that a token made certain, and the ``last`` text that only the end made so."""

    certain: str
    last: str = ""
    finish: Finish | None = None


class OutputProcessor:
    """Turns the tokens of one sequence into text and decides when it ends.

    What is told after n tokens depends on these n ids and the parameters alone.  So a later attempt
    that ``replay``s the ids of an earlier one goes on with exactly the text that one would have
    told.  ``num_published_chars`` is the length of the text in the token log; None takes it to be
    what the replayed ids make certain, which is the same unless another version wrote the log.

    The id of an EOS or stop token belongs to the output, its text only if the parameters include
    stop strings in the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_len: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] | None = None,
        num_published_chars: int | None = None,
    ) -> None:
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._strings = StopStrings(params.stop, include_in_output=self._include_stop)
        self._checker = StopChecker(
            params,
            prompt_len=prompt_len,
            max_model_len=max_model_len,
            eos_token_ids=tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids,
        )
        detection = params.repetition_detection
        self._repetition = RepetitionDetector(detection) if detection else None
        self._num_published_chars = num_published_chars
        self._num_tokens = 0
        #: Characters still to come that the token log holds already.
        self._num_to_skip = 0

    def process(self, token_id: int) -> Output:
        """Take the next token; not to be called again after an output with a finish."""
        step = self._take(token_id)
        return Output(self._untold(step.certain + step.last), step.finish)

    def replay(self, token_ids: Sequence[int]) -> Output:
        """Take the tokens of an earlier attempt; ``text`` is what it did not publish.

        ``finish`` is set if these tokens are the whole output already.
        """
        certain, last, finish = "", "", None
        for token_id in token_ids:
            step = self._take(token_id)
            certain += step.certain
            if step.finish is not None:
                last, finish = step.last, step.finish
                break
        published = self._num_published_chars
        self._num_to_skip = len(certain) if published is None else published
        return Output(self._untold(certain + last), finish)

    def flush(self) -> str:
        """Return the text held back, for a sequence that ends by other means, as by a cancel."""
        released = self._strings.push(self._detokenizer.flush(), may_stop=False)
        return self._untold(released.text + self._strings.flush())

    def _take(self, token_id: int) -> "_Step":
        self._num_tokens += 1
        is_repetition = self._repetition is not None and self._repetition.push(token_id)
        finish = self._checker.check_token(token_id, self._num_tokens)
        if finish is not None:
            text = self._detokenizer.push(token_id) if self._include_stop else ""
            return self._end("", text, finish)
        released = self._search(self._detokenizer.push(token_id))
        if released.stop is not None:
            return _Step("", released.text, Finish(FinishReason.STOP, released.stop))
        finish = self._checker.check_length(self._num_tokens, is_repetition=is_repetition)
        if finish is not None:
            return self._end(released.text, "", finish)
        return _Step(released.text)

    def _end(self, certain: str, text: str, finish: Finish) -> "_Step":
        # What had been held back may still complete a stop string, which is then the reason.
        released = self._search(text + self._detokenizer.flush())
        if released.stop is not None:
            return _Step(certain, released.text, Finish(FinishReason.STOP, released.stop))
        return _Step(certain, released.text + self._strings.flush(), finish)

    def _search(self, text: str) -> Released:
        may_stop = self._checker.allows_stop_strings(self._num_tokens)
        return self._strings.push(text, may_stop=may_stop)

    def _untold(self, text: str) -> str:
        num_told = min(self._num_to_skip, len(text))
        self._num_to_skip -= num_told
        return text[num_told:]
