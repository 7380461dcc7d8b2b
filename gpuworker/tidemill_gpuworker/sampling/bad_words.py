"""From words that must not appear to the token sequences that spell them."""

from collections.abc import Sequence
from functools import lru_cache

from tidemill.protocol.errors import InvalidRequest
from tidemill.service.tokenizer import Tokenizer

#: Lists of words that are remembered: jobs of one request, or of one application, have the same.
_REMEMBERED = 8


def tokenize_bad_words(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, in vLLM's way.

    A word is forbidden as it is spelled at the beginning of a text and, where that takes as many
    tokens of which the first is another one, as it is spelled after a space.  Raises
    ``InvalidRequest`` for a word that has no tokens of the model.
    """
    return _spelled(tuple(words), tokenizer, vocab_size)


@lru_cache(_REMEMBERED)
def _spelled(
    words: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    spelled: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        _check(word, bare, vocab_size)
        spelled.append(bare)
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            _check(word, spaced, vocab_size)
            spelled.append(spaced)
    return tuple(spelled)


def _check(word: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if not ids or max(ids) >= vocab_size:
        raise InvalidRequest(
            f"params.bad_words: {word[:40]!r} has no tokens in the model's vocabulary",
            field="params.bad_words",
            fix="Leave it out: the model cannot generate it.",
        )
