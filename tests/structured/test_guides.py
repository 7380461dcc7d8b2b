"""What a grammar does to a sequence: from its first token to its end, in a batch and replayed."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from support.guided_engine import (
    ended_by_itself,
    guided_seq,
    noisy_engine,
    run_all,
    text_of,
)
from support.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.grammar import grammar_of
from tidemill_gpuworker.sampling.guide import Guide
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler, grammar_compiler
from tidemill_gpuworker.structured_output.grammar_guide import GrammarGuide
from tidemill_gpuworker.structured_output.vocabulary import vocabulary_of

TOKENIZER = byte_level_tokenizer()
#: More logits than tokens, as models have that pad their vocabulary.
VOCAB_SIZE = TOKENIZER.vocab_size + 5
EOS = TOKENIZER.eos_token_ids[0]
CHOICES = ["yes", "no", 'a "quoted" \\ back\nslash', "größer 😀", "\u0007bell"]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    assert made is not None
    yield made
    made.close()


def answers(compiler: GrammarCompiler, num: int = 8, **structured: Any) -> list[str]:
    """Answers of different seeds, all of which end."""
    asked = StructuredOutput.model_validate(structured)
    seqs = [
        guided_seq(compiler, asked, seq_id=f"seq-{seed}", seed=seed, max_tokens=500)
        for seed in range(num)
    ]
    told = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), seqs)
    assert all(map(ended_by_itself, told.values()))
    return [text_of(steps) for steps in told.values()]


def allowed(guide: Guide) -> set[int]:
    row = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)
    guide.fill_mask(row)
    return {token for token in range(VOCAB_SIZE) if row[token // 32] >> token % 32 & 1}


def guide_of(compiler: GrammarCompiler, **structured: Any) -> Guide:
    guide = guided_seq(compiler, StructuredOutput.model_validate(structured)).guide
    assert guide is not None
    return guide


def test_an_answer_matches_its_whole_pattern(compiler: GrammarCompiler) -> None:
    for text in answers(compiler, regex=r"(ab|c){2,5}-[0-9]+"):
        assert re.fullmatch(r"(ab|c){2,5}-[0-9]+", text)


def test_an_answer_is_one_of_its_choices_whatever_characters_they_have(
    compiler: GrammarCompiler,
) -> None:
    assert set(answers(compiler, num=40, choice=CHOICES)) == set(CHOICES)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: term ("+" term)*\nterm: /[1-9][0-9]*/ | "(" start ")"',
        'root ::= term ("+" term)*\nterm ::= [1-9] [0-9]* | "(" root ")"',
    ],
    ids=["lark", "gbnf"],
)
def test_an_answer_follows_its_grammar(compiler: GrammarCompiler, grammar: str) -> None:
    for text in answers(compiler, grammar=grammar):
        assert re.fullmatch(r"[0-9+()]+", text)
        assert eval(text) >= 0  # a sum of numbers, by Python's own parser


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({"regex": "(?=a)b"}, "structured.regex: .*look-around"),
        ({"regex": "["}, "structured.regex: .*unclosed"),
        ({"grammar": "start: missing"}, "structured.grammar: .*missing"),
        ({"grammar": "root ::= ("}, "structured.grammar: "),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, structured: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        guide_of(compiler, **structured)


def test_a_complete_answer_can_only_end(compiler: GrammarCompiler) -> None:
    guide = guide_of(compiler, regex="ab")
    assert EOS not in allowed(guide)
    for token in TOKENIZER.encode("ab", add_special_tokens=False):
        assert not guide.has_ended
        assert token in allowed(guide)
        guide.accept(token)
    assert guide.has_ended
    assert allowed(guide) == {EOS}
    guide.accept(EOS)
    assert allowed(guide) == {EOS}


def test_an_answer_that_may_go_on_may_end_too(compiler: GrammarCompiler) -> None:
    guide = guide_of(compiler, regex="a+")
    guide.accept(TOKENIZER.encode("a", add_special_tokens=False)[0])
    assert not guide.has_ended
    assert allowed(guide) == {EOS, *TOKENIZER.encode("a", add_special_tokens=False)}


def test_a_token_that_may_not_come_is_an_error(compiler: GrammarCompiler) -> None:
    guide = guide_of(compiler, regex="ab")
    with pytest.raises(ValueError, match="may not come here"):
        guide.accept(TOKENIZER.encode("c", add_special_tokens=False)[0])


def test_padding_of_the_vocabulary_is_never_allowed(compiler: GrammarCompiler) -> None:
    assert max(allowed(guide_of(compiler, regex="(.|\n)*"))) < TOKENIZER.vocab_size


def test_min_tokens_yields_to_the_end_of_the_grammar(compiler: GrammarCompiler) -> None:
    seq = guided_seq(compiler, StructuredOutput(regex="ab{3}"), min_tokens=12, max_tokens=50)
    told = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), [seq])["seq"]
    assert text_of(told) == "abbb"
    assert ended_by_itself(told)
    assert len(seq.output_ids) == 12
    assert set(seq.output_ids[4:]) == {EOS}


def test_min_tokens_makes_an_answer_longer_where_the_grammar_lets_it(
    compiler: GrammarCompiler,
) -> None:
    seq = guided_seq(compiler, StructuredOutput(regex="[ab]+"), min_tokens=20, max_tokens=400)
    text = text_of(run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), [seq])["seq"])
    assert re.fullmatch("[ab]+", text)
    assert EOS not in seq.output_ids[:19]


def test_ignore_eos_adds_nothing_to_a_complete_answer(compiler: GrammarCompiler) -> None:
    seq = guided_seq(compiler, StructuredOutput(choice=["no"]), ignore_eos=True, max_tokens=9)
    told = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), [seq])["seq"]
    assert text_of(told) == "no"
    assert len(seq.output_ids) == 9


def test_a_sequence_without_any_token_left_fails_by_the_names_of_the_fields(
    compiler: GrammarCompiler,
) -> None:
    letter = TOKENIZER.encode("b", add_special_tokens=False)
    seq = guided_seq(compiler, StructuredOutput(regex="a"), allowed_token_ids=letter)
    engine = noisy_engine(TOKENIZER, VOCAB_SIZE)
    engine.add(seq)
    with pytest.raises(InvalidRequest, match="leaves no token to choose") as caught:
        engine.step()
    assert "allowed_token_ids" in caught.value.fix and "structure" in caught.value.fix


def test_a_guided_row_leaves_the_other_rows_of_its_batch_as_they_are(
    compiler: GrammarCompiler,
) -> None:
    def plain() -> list[Any]:
        return [
            guided_seq(compiler, None, seq_id=f"plain-{i}", seed=i, max_tokens=40, temperature=t)
            for i, t in enumerate((0.0, 0.7, 1.3))
        ]

    alone = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), plain())
    guided = [
        guided_seq(compiler, StructuredOutput(json_object=True), seq_id=f"g-{i}", seed=i)
        for i in range(3)
    ]
    first, second, third = plain()
    mixed = run_all(
        noisy_engine(TOKENIZER, VOCAB_SIZE),
        [guided[0], first, guided[1], second, third, guided[2]],
    )
    for name, steps in alone.items():
        assert [step.new_ids for step in mixed[name]] == [step.new_ids for step in steps]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_later_attempt_goes_on_where_the_earlier_one_stopped(data: st.DataObject) -> None:
    made = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    assert made is not None
    structured = StructuredOutput(regex="(ab|cd)+[0-9]{2,9}x*")
    seed = data.draw(st.integers(0, 1000))
    whole = guided_seq(made, structured, seed=seed, max_tokens=100)
    run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), [whole])
    cut = data.draw(st.integers(0, len(whole.output_ids) - 1))
    again = guided_seq(
        made, structured, seed=seed, max_tokens=100, output_ids=whole.output_ids[:cut]
    )
    run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), [again])
    assert again.output_ids == whole.output_ids
    made.close()


def test_tokens_that_the_grammar_never_allowed_are_not_replayed(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(InvalidRequest, match=r"structured\.regex: the tokens of an earlier"):
        guided_seq(compiler, StructuredOutput(regex="a"), output_ids=[EOS, EOS])


def test_tokens_can_be_taken_back(compiler: GrammarCompiler) -> None:
    compilation = compiler.compile(StructuredOutput(regex="abc[0-9]"))
    compilation.future.result(timeout=60)
    guide = compilation.guide()
    before = allowed(guide)
    tokens = TOKENIZER.encode("ab", add_special_tokens=False) + TOKENIZER.encode(
        "c1", add_special_tokens=False
    )
    guide.replay(tokens)
    assert guide.is_complete and guide.has_ended
    guide.rollback(len(tokens))
    assert not guide.is_complete
    assert allowed(guide) == before


def test_a_mask_that_costs_too_much_is_an_error_of_the_constraint() -> None:
    vocabulary = vocabulary_of(TOKENIZER, VOCAB_SIZE)
    assert vocabulary is not None
    grammar = grammar_of(StructuredOutput(grammar='start: "a" start "b" | start start | "c"'))
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(step_max_items=2))
    guide = GrammarGuide(matcher, "structured.grammar")
    with pytest.raises(InvalidRequest, match=r"structured\.grammar: it became too complex"):
        allowed(guide)


def test_a_tokenizer_of_the_sentencepiece_kind_is_guided_too() -> None:
    tokenizer = sentencepiece_tokenizer()
    compiler = grammar_compiler(tokenizer, tokenizer.vocab_size)
    assert compiler is not None
    seq = guided_seq(compiler, StructuredOutput(choice=["ab 東 c"]), max_tokens=60)
    told = run_all(noisy_engine(tokenizer, tokenizer.vocab_size), [seq])["seq"]
    assert text_of(told).strip() == "ab 東 c"
    compiler.close()
