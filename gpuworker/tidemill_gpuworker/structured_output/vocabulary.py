"""What llguidance must know of a model's tokens."""

import logging

from llguidance import LLTokenizer

from tidemill.service.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer | None:
    """Return the tokens of a model with ``vocab_size`` logits; None if grammars cannot use them.

    Takes up to a second and holds the interpreter's lock: not for the step loop's time.
    """
    if not tokenizer.eos_token_ids:
        _log.warning("no structured output: the model has no end-of-sequence token")
        return None
    try:
        return LLTokenizer(
            tokenizer.raw.to_str(), n_vocab=vocab_size, eos_token=list(tokenizer.eos_token_ids)
        )
    except ValueError as error:
        _log.warning("no structured output: llguidance cannot use the tokenizer: %s", error)
        return None
