"""Guesses the next tokens of sequences, as many as may be of use."""

from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.ngram import TokenHistory, propose


class Drafter:
    """Makes the drafts of a step scheduler."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._config = config
        self._max_model_len = max_model_len

    def is_on(self, num_running: int) -> bool:
        """Whether a step of so many sequences guesses at all."""
        most = self._config.disable_by_batch_size
        return most is None or num_running <= most

    def draft(self, seq: Sequence) -> tuple[int, ...]:
        """Return a guess of what follows the known tokens; empty if there is none.

        No guess reaches behind the end of the sequence, or contains what its guide refuses.
        """
        most = self._most_tokens(seq)
        if most < 1 or seq.is_beam:
            return ()
        config = self._config
        history = _history_of(seq)
        tokens = propose(history.tokens, most, config.prompt_lookup_min, config.prompt_lookup_max)
        if seq.guide is not None and tokens:
            tokens = tokens[: seq.guide.count_allowed(tokens)]
        return tuple(tokens)

    def _most_tokens(self, seq: Sequence) -> int:
        # The step gives one token more than it guesses.
        most = min(self._config.num_speculative_tokens, self._max_model_len - seq.num_tokens - 1)
        if seq.params.max_tokens is not None:
            most = min(most, seq.params.max_tokens - len(seq.output_ids) - 1)
        return most


def _history_of(seq: Sequence) -> TokenHistory:
    if seq.history is None:
        seq.history = TokenHistory()
    seq.history.extend(seq.token_slice(len(seq.history), seq.num_tokens))
    return seq.history
