"""When outputs end and with which text; and that no takeover changes a character of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tiny_tokenizers import SPECIAL, byte_level_tokenizer, sentencepiece_tokenizer
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.output_processor import Output, OutputProcessor
from tidemill_gpuworker.engine.stop_checker import Finish

BYTES = byte_level_tokenizer()
PIECES = sentencepiece_tokenizer()
EOS = BYTES.eos_token_ids[0]
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def make_processor(
    params: SamplingParams | None = None,
    *,
    tokenizer: Tokenizer = BYTES,
    max_model_len: int = 1000,
    num_published_chars: int | None = None,
    **fields: Any,
) -> OutputProcessor:
    return OutputProcessor(
        tokenizer,
        params or SamplingParams(**fields),
        prompt_len=10,
        max_model_len=max_model_len,
        num_published_chars=num_published_chars,
    )


@dataclass
class Run:
    """What a processor told for the ids it took before it ended."""

    texts: list[str] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def outcome(self) -> tuple[str, int, Finish | None]:
        return "".join(self.texts), len(self.texts), self.finish


def run(processor: OutputProcessor, ids: Sequence[int]) -> Run:
    result = Run()
    for token_id in ids:
        output = processor.process(token_id)
        result.texts.append(output.text)
        if output.finish is not None:
            result.finish = output.finish
            break
    return result


def outcome(text: str, **fields: Any) -> tuple[str, int, Finish | None]:
    return run(make_processor(**fields), BYTES.encode(text)).outcome


def test_an_eos_token_ends_the_output_without_its_text() -> None:
    assert outcome(f"hi{SPECIAL}x", skip_special_tokens=False) == ("hi", 3, Finish(STOP))


def test_an_output_that_repeats_itself_ends_after_min_tokens() -> None:
    detection = {"max_pattern_size": 3, "min_count": 3}
    end = Finish(FinishReason.REPETITION)
    assert outcome("xyzbcbcbcz", repetition_detection=detection) == ("xyzbcbcbc", 9, end)
    longer = outcome("xbbbbbz", repetition_detection=detection, min_tokens=6)
    assert longer == ("xbbbbb", 6, end)
    assert outcome("bbb", repetition_detection=detection, max_tokens=3)[2] == Finish(LENGTH)


def test_an_ignored_eos_token_is_a_token_like_any_other() -> None:
    text = f"hi{SPECIAL}x"
    assert outcome(text, ignore_eos=True) == ("hix", 4, None)
    assert outcome(text, ignore_eos=True, skip_special_tokens=False) == (text, 4, None)


def test_a_stop_token_ends_the_output_without_its_text_and_is_named() -> None:
    x = BYTES.encode("x")[0]
    assert outcome("hixy", stop_token_ids=(x,)) == ("hi", 3, Finish(STOP, x))
    included = outcome("hixy", stop_token_ids=(x,), include_stop_str_in_output=True)
    assert included == ("hix", 3, Finish(STOP, x))


def test_eos_is_told_before_a_stop_token_of_the_same_id() -> None:
    assert outcome(f"hi{SPECIAL}", stop_token_ids=(EOS,)) == ("hi", 3, Finish(STOP))
    ignored = outcome(f"hi{SPECIAL}", stop_token_ids=(EOS,), ignore_eos=True)
    assert ignored == ("hi", 3, Finish(STOP, EOS))


def test_a_stop_token_is_told_before_the_length() -> None:
    assert outcome(f"hi{SPECIAL}", max_tokens=3) == ("hi", 3, Finish(STOP))


def test_a_stop_string_is_told_before_the_length() -> None:
    assert outcome("hi.", stop=(".",), max_tokens=3) == ("hi", 3, Finish(STOP, "."))


def test_max_tokens_and_the_model_length_end_the_output() -> None:
    assert outcome("hello", max_tokens=2) == ("he", 2, Finish(LENGTH))
    assert outcome("hello", max_model_len=13) == ("hel", 3, Finish(LENGTH))
    assert outcome("hello", max_model_len=13, max_tokens=4) == ("hel", 3, Finish(LENGTH))
    assert outcome("hello", max_model_len=13, max_tokens=2) == ("he", 2, Finish(LENGTH))


def test_the_last_token_brings_what_was_held_back() -> None:
    assert outcome("a-", stop=("--",), max_tokens=2) == ("a-", 2, Finish(LENGTH))
    assert outcome(f"a-{SPECIAL}", stop=("--",)) == ("a-", 3, Finish(STOP))
    half = BYTES.encode("🙂")[:2]
    processor = make_processor(max_tokens=2)
    assert run(processor, half).outcome == (BYTES.decode(half), 2, Finish(LENGTH))


def test_held_back_text_may_complete_a_stop_string_at_the_end() -> None:
    half = BYTES.encode("🙂")[:1]
    processor = make_processor(max_tokens=2, stop=("a\ufffd",))
    assert run(processor, BYTES.encode("a") + half).outcome == ("", 2, Finish(STOP, "a\ufffd"))


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_over_several_tokens_is_never_told_in_part(include: bool) -> None:
    fields: dict[str, Any] = {"stop": ("###",), "include_stop_str_in_output": include}
    result = run(make_processor(**fields), BYTES.encode("x##y###z"))
    assert result.texts == ["x", "", "", "##y", "", "", "###" if include else ""]
    assert result.finish == Finish(STOP, "###")


def test_min_tokens_holds_off_stop_strings_and_stop_tokens() -> None:
    x = BYTES.encode("x")[0]
    assert outcome("a.b.c", stop=(".",), min_tokens=2) == ("a.b", 4, Finish(STOP, "."))
    assert outcome("axbxc", stop_token_ids=(x,), min_tokens=3) == ("axb", 4, Finish(STOP, x))
    assert outcome("xyz", min_tokens=2, max_tokens=2) == ("xy", 2, Finish(LENGTH))


def test_flush_gives_what_is_held_back_for_a_cancelled_sequence() -> None:
    processor = make_processor(stop=("--",))
    half = BYTES.encode("🙂")[:1]
    assert run(processor, BYTES.encode("a-")).texts == ["a", ""]
    assert processor.process(half[0]) == Output("")
    assert processor.flush() == "-\ufffd"
    assert processor.flush() == ""


def test_replaying_a_whole_output_ends_it_at_once() -> None:
    ids = BYTES.encode(f"a-{SPECIAL}")
    assert make_processor(stop=("--",)).replay(ids) == Output("-", Finish(STOP))
    processor = make_processor(num_published_chars=2)
    assert processor.replay(ids) == Output("", Finish(STOP))


def test_a_replay_tells_what_an_earlier_version_had_not_published() -> None:
    processor = make_processor(num_published_chars=2)
    assert processor.replay(BYTES.encode("abcd")) == Output("cd")
    assert processor.process(BYTES.encode("x")[0]) == Output("x")


def test_text_that_an_earlier_version_published_too_early_is_not_told_again() -> None:
    processor = make_processor(num_published_chars=3, stop=("cX",))
    assert processor.replay(BYTES.encode("abc")) == Output("")
    assert processor.process(BYTES.encode("d")[0]) == Output("d")


def expected_outcome(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams
) -> tuple[str, int, FinishReason | None]:
    """By brute force over all prefixes: the text, the number of tokens and the reason."""
    limit = 1000 if params.max_tokens is None else params.max_tokens
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], params.skip_special_tokens)
        if count >= params.min_tokens:
            is_eos = ids[count - 1] in tokenizer.eos_token_ids and not params.ignore_eos
            if is_eos or ids[count - 1] in params.stop_token_ids:
                return tokenizer.decode(ids[: count - 1], params.skip_special_tokens), count, STOP
        ends = [text.find(stop) + len(stop) for stop in params.stop if stop in text]
        if ends:
            end = min(ends)
            stops = [stop for stop in params.stop if text[:end].endswith(stop)]
            return text[: end - max(map(len, stops))], count, STOP
        if count >= limit:
            return text, count, LENGTH
    return tokenizer.decode(ids, params.skip_special_tokens), len(ids), None


ids_lists = st.lists(
    st.integers(0, BYTES.vocab_size - 1) | st.sampled_from([*BYTES.encode(" ab. \n🙂"), EOS]),
    max_size=30,
)
param_sets = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(20, 30),
    min_tokens=st.integers(0, 20),
    stop=st.lists(st.text(" ab.\n", min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 255), max_size=2).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
)


@settings(deadline=None)
@given(ids=ids_lists, params=param_sets)
def test_any_output_ends_where_brute_force_says(ids: list[int], params: SamplingParams) -> None:
    if params.stop:  # min_tokens with stop strings has its own tests
        params = params.model_copy(update={"min_tokens": 0})
    params = params.model_copy(update={"include_stop_str_in_output": False})
    processor = make_processor(params)
    result = run(processor, ids)
    text, count, finish = result.outcome
    rest = "" if finish else processor.flush()
    expected = expected_outcome(BYTES, ids, params)
    assert (text + rest, count, finish and finish.reason) == expected


@settings(deadline=None, max_examples=200)
@given(
    ids=ids_lists,
    params=param_sets,
    cuts=st.lists(st.integers(0, 30), max_size=4),
    knows_length=st.booleans(),
    tokenizer=st.sampled_from([BYTES, PIECES]),
)
def test_takeovers_at_any_tokens_change_nothing_that_is_told(
    ids: list[int],
    params: SamplingParams,
    cuts: list[int],
    knows_length: bool,
    tokenizer: Tokenizer,
) -> None:
    uninterrupted = run(make_processor(params, tokenizer=tokenizer), ids)
    told: list[str] = []
    processor = make_processor(params, tokenizer=tokenizer)
    for count, token_id in enumerate(ids[: len(uninterrupted.texts)]):
        for _ in range(cuts.count(count)):
            length = len("".join(told)) if knows_length else None
            processor = make_processor(params, tokenizer=tokenizer, num_published_chars=length)
            assert processor.replay(ids[:count]) == Output("")
        output = processor.process(token_id)
        told.append(output.text)
    assert told == uninterrupted.texts
    if told:
        assert output.finish == uninterrupted.finish


@settings(deadline=None)
@given(ids=ids_lists, params=param_sets, cut=st.integers(0, 30), tokenizer=st.just(PIECES))
def test_a_cancel_after_a_takeover_tells_the_same_held_back_text(
    ids: list[int], params: SamplingParams, cut: int, tokenizer: Tokenizer
) -> None:
    first = make_processor(params, tokenizer=tokenizer)
    result = run(first, ids)
    if result.finish is None:
        second = make_processor(params, tokenizer=tokenizer)
        second.replay(ids[:cut])
        run(second, ids[cut:])
        assert second.flush() == first.flush()
