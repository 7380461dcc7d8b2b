"""Bad words are spelled as in vLLM: at the beginning of a text, and after a space."""

import pytest

from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.errors import InvalidRequest
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.sampling.bad_words import tokenize_bad_words

TOKENIZER = byte_level_tokenizer()


def id_of(word: str, tokenizer: Tokenizer = TOKENIZER) -> int:
    token_id = tokenizer.raw.token_to_id(word)
    assert token_id is not None
    return token_id


def spelled(*words: str) -> tuple[tuple[int, ...], ...]:
    return tokenize_bad_words(words, TOKENIZER, TOKENIZER.vocab_size)


def test_a_word_with_a_token_of_its_own_after_a_space_is_forbidden_there_too() -> None:
    assert spelled("ab") == ((id_of("ab"),), (id_of("Ġab"),))
    assert spelled("  ab") == spelled("ab")


def test_a_word_that_takes_more_tokens_after_a_space_is_covered_by_its_bare_form() -> None:
    assert spelled("xy") == ((id_of("x"), id_of("y")),)


def test_words_are_spelled_in_their_order() -> None:
    assert spelled("a", "xy", "ab") == (*spelled("a"), *spelled("xy"), *spelled("ab"))


def test_a_word_outside_the_models_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"params\.bad_words: 'ab'"):
        tokenize_bad_words(["ab"], TOKENIZER, vocab_size=id_of("ab"))


def test_the_words_of_many_jobs_are_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    first = tokenize_bad_words(["ab", "xy"], tokenizer, tokenizer.vocab_size)
    monkeypatch.delattr(Tokenizer, "encode")
    assert tokenize_bad_words(("ab", "xy"), tokenizer, tokenizer.vocab_size) is first
    # Those of another tokenizer are others.
    with pytest.raises(AttributeError, match="encode"):
        tokenize_bad_words(("ab", "xy"), byte_level_tokenizer(), tokenizer.vocab_size)
