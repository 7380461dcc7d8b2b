"""Text comes as soon as it is certain, and adds up to what decoding everything at once gives."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from support.tiny_tokenizers import (
    MARKUP,
    SPECIAL,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles
from tidemill_gpuworker.engine.detokenizer import Detokenizer


def id_of(tokenizer: Tokenizer, word: str) -> int:
    token_id = tokenizer.raw.token_to_id(word)
    assert token_id is not None
    return token_id


BYTES = byte_level_tokenizer()
PIECES = sentencepiece_tokenizer()
BYTE_TOKENS = {byte: id_of(PIECES, f"<0x{byte:02X}>") for byte in range(256)}
WORDS = sorted(set(range(PIECES.vocab_size)) - set(BYTE_TOKENS.values()))

NASTY = "Naïve 東京 🙂👩‍👧 a  b\n\n\tx é\u0301 नमस्ते \x00 "


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def check_pieces(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> None:
    pieces = pieces_of(tokenizer, ids, skip=skip)
    whole = tokenizer.decode(ids, skip)
    assert "".join(pieces) == whole
    for num_ids in range(len(ids) + 1):
        so_far = tokenizer.decode(ids[:num_ids], skip)
        told = "".join(pieces[:num_ids])
        if so_far.endswith("\ufffd"):
            assert whole.startswith(told), "what is told stays true"
        else:
            assert told == so_far, "nothing certain is held back"


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=40), skip=st.booleans())
@example(ids=[200, 200, 65], skip=True)
def test_any_byte_level_ids_add_up_to_their_text(ids: list[int], skip: bool) -> None:
    check_pieces(BYTES, ids, skip=skip)


def as_byte_tokens(character: str) -> list[int]:
    return [BYTE_TOKENS[byte] for byte in character.encode()]


@settings(deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(WORDS).map(lambda word: [word])
        | st.characters(codec="utf-8", exclude_characters="\ufffd").map(as_byte_tokens),
        max_size=25,
    ),
    skip=st.booleans(),
)
@example(parts=[[id_of(PIECES, "▁")]] * 3, skip=True)
@example(parts=[as_byte_tokens(" "), [id_of(PIECES, "▁a")]], skip=True)
def test_any_sentencepiece_ids_add_up_to_their_text(parts: list[list[int]], skip: bool) -> None:
    check_pieces(PIECES, [token_id for part in parts for token_id in part], skip=skip)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_nasty_text_comes_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(NASTY)
    check_pieces(tokenizer, ids)
    assert "".join(pieces_of(tokenizer, ids)) == NASTY


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_only_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{SPECIAL}{MARKUP}")
    check_pieces(tokenizer, ids, skip=True)
    check_pieces(tokenizer, ids, skip=False)
    assert SPECIAL not in "".join(pieces_of(tokenizer, ids, skip=True))
    assert SPECIAL in "".join(pieces_of(tokenizer, ids, skip=False))
    assert MARKUP in "".join(pieces_of(tokenizer, ids, skip=True))


def test_added_tokens_are_joined_on_request() -> None:
    words = RawTokenizer(models.WordLevel({"a": 0, "<x>": 1, "<y>": 2}, unk_token="a"))
    words.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(TokenizerFiles(words.to_str()))
    ids = [0, 1, 2, 1, 0, 0, 2]

    def text_of(**flags: bool) -> str:
        detokenizer = Detokenizer(tokenizer, **flags)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    assert text_of(skip_special_tokens=False) == words.decode(ids, skip_special_tokens=False)
    apart = text_of(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert apart == "a <x><y><x> a a <y>"
    assert text_of(spaces_between_special_tokens=False) == words.decode(ids)


def test_a_character_appears_with_its_last_byte() -> None:
    assert pieces_of(BYTES, BYTES.encode("🙂!")) == ["", "", "🙂", "!", ""]
    assert pieces_of(PIECES, as_byte_tokens("🙂")) == ["", "", "", "🙂", ""]


def test_the_first_space_of_a_sentencepiece_text_alone_is_dropped() -> None:
    ids = [id_of(PIECES, word) for word in ("▁a", "▁b", "▁▁", "▁a")]
    assert pieces_of(PIECES, ids) == ["a", " b", "  ", " a", ""]


def test_an_incomplete_character_is_told_at_the_end_only() -> None:
    start_of_emoji = BYTES.encode("🙂")[:-1]
    pieces = pieces_of(BYTES, [*BYTES.encode("a"), *start_of_emoji])
    assert pieces[:-1] == ["a", *[""] * len(start_of_emoji)]
    assert pieces[-1] == BYTES.decode(start_of_emoji)
    assert "\ufffd" in pieces[-1]


def test_valid_bytes_told_before_broken_ones_stay_as_they_were_told() -> None:
    ids = [BYTE_TOKENS[ord("A")], BYTE_TOKENS[0xE6], id_of(PIECES, "▁b")]
    assert pieces_of(PIECES, ids) == ["A", "", "\ufffd b", ""]
    assert PIECES.decode(ids) == "\ufffd\ufffd b", "decoding at once garbles the A"


def test_endless_broken_bytes_are_told_in_bounded_pieces() -> None:
    broken = id_of(BYTES, "Ģ")
    assert BYTES.decode([broken]) == "\ufffd"
    detokenizer = Detokenizer(BYTES)
    told = ""
    for count in range(1, 1000):
        told += detokenizer.push(broken)
        assert count - len(told) <= 64
    assert told + detokenizer.flush() == "\ufffd" * 999


def test_flush_without_anything_pending_is_empty() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.flush() == ""
    detokenizer.push(BYTES.encode("a")[0])
    assert detokenizer.flush() == ""


@pytest.mark.model
def test_the_real_tokenizer_adds_up(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(demo_model_dir)
    for text in (NASTY, "def f(x):\n    return x ** 2  # 12345\n" * 5, "<|im_start|>a<|im_end|>b"):
        for skip in (True, False):
            check_pieces(tokenizer, tokenizer.encode(text), skip=skip)
