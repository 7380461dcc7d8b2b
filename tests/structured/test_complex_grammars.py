"""Grammars that become too complex within an answer end their job, and nobody else's."""

import threading
from collections.abc import Iterator

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from prometheus_client import REGISTRY

from support.grammar_stage import TOKENIZER, VOCAB_SIZE, VOCABULARY, GrammarStage
from tidemill.protocol.errors import GrammarTooComplex
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.grammar import grammar_of
from tidemill_gpuworker.speculation.draft_row import GuideAhead
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler
from tidemill_gpuworker.structured_output.grammar_guide import GrammarGuide

#: Whoever follows it must know of each of the last 300 characters whether it was one of a to m.
REGEX = "[a-z ]*[a-m][a-z ]{300}x"
#: So many states of the lexer hold about 20 tokens of such an answer.
LIMITS = LLParserLimits(max_lexer_states=100)
TOO_COMPLEX = "structured.regex: it became too complex within the answer: lexer error"


class Stage(GrammarStage):
    """A job runner whose grammars soon become too complex."""

    def __init__(self) -> None:
        self.num_built = 0
        super().__init__(self.build)

    def build(self, structured: StructuredOutput) -> LLMatcher:
        self.num_built += 1
        return LLMatcher(VOCABULARY, grammar_of(structured), log_level=0, limits=LIMITS)

    def finish(self) -> None:
        """Step until all jobs have ended."""
        for _ in range(500):
            if not self.runner.has_work:
                self.engine.step_scheduler.check_integrity()
                return
            if self.runner.can_step:
                self.runner.step()
            else:
                assert self.woken.wait(20)
                self.woken.clear()
        raise AssertionError("the jobs never end")


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.compiler.close()


def num_failed_steps() -> float | None:
    return REGISTRY.get_sample_value("tidemill_worker_step_failures_total")


def undisturbed(num_tokens: int) -> list[int]:
    """What the job ``plain`` says alone."""
    alone = Stage()
    alone.admit("plain", num_tokens=num_tokens)
    alone.finish()
    alone.compiler.close()
    return [token for update in alone.record.updates["plain"] for token in update.ids]


def test_only_the_job_that_is_too_complex_ends_and_it_says_why(stage: Stage) -> None:
    before = num_failed_steps()
    stage.admit("plain", num_tokens=200)
    stage.admit("complex", regex=REGEX, num_tokens=400)
    stage.finish()
    end = stage.record.end("complex")
    assert end.state == "failed"
    assert end.error.startswith(TOO_COMPLEX)
    assert "Tokens" not in end.error
    assert 15 < stage.record.num_tokens("complex") < 40
    told = [token for update in stage.record.updates["plain"] for token in update.ids]
    assert told == undisturbed(200)
    assert num_failed_steps() == before


def test_an_answer_goes_on_whose_grammar_another_one_has_used_up(stage: Stage) -> None:
    stage.admit("complex", regex=REGEX, num_tokens=400)
    for number in range(3):
        stage.admit(f"short {number}", regex=REGEX, num_tokens=15)
    stage.finish()
    stage.admit("later", regex=REGEX, num_tokens=15)
    stage.finish()
    assert stage.record.end("complex").error.startswith(TOO_COMPLEX)
    for job_id in ("short 0", "short 1", "short 2", "later"):
        assert stage.record.end(job_id).finish_reason == "length"
        assert stage.record.num_tokens(job_id) == 15
    # One for all, one for each of the first four at most, one for the last.
    assert 2 <= stage.num_built <= 6


def too_complex_tokens(guide: GrammarGuide) -> list[int]:
    """Follow a guide until it fails; returns the tokens until then."""
    taken: list[int] = []
    row = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)
    letters = TOKENIZER.encode("q a z c i d p y o u m", add_special_tokens=False)
    with pytest.raises(GrammarTooComplex):
        for number in range(200):
            guide.fill_mask(row)
            taken.append(letters[(number * number) % len(letters)])
            guide.accept(taken[-1])
    return taken


def test_tokens_of_an_earlier_attempt_are_not_blamed_for_what_is_too_complex() -> None:
    structured = StructuredOutput(regex=REGEX)
    built = threading.Event()

    def build(asked: StructuredOutput) -> LLMatcher:
        built.set()
        return LLMatcher(VOCABULARY, grammar_of(asked), log_level=0, limits=LIMITS)

    compiler = GrammarCompiler(VOCABULARY, build=build)
    compilation = compiler.compile(structured)
    compilation.future.result(timeout=20)
    taken = too_complex_tokens(compilation.guide())
    with pytest.raises(GrammarTooComplex, match="too many states"):
        compilation.guide(taken)
    again = compiler.compile_again(compilation)
    again.future.result(timeout=20)
    again.guide(taken)
    assert compiler.compile(structured) is not compilation
    compiler.close()


def test_a_draft_that_is_too_complex_leaves_its_guide_as_it_was() -> None:
    grammar = grammar_of(StructuredOutput(grammar='start: "a" start "b" | start start | "c"'))
    limits = LLParserLimits(step_max_items=20)
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits)
    guide = GrammarGuide(matcher, "structured.grammar")
    before, behind, after = torch.zeros(3, -(-VOCAB_SIZE // 32), dtype=torch.int32)
    guide.fill_mask(before)
    draft = tuple(TOKENIZER.encode("c" * 8, add_special_tokens=False))
    with pytest.raises(GrammarTooComplex):
        GuideAhead(guide, draft).fill_mask(behind)
    guide.fill_mask(after)
    assert before.tolist() == after.tolist()


def follow(grammar: str, num_tokens: int) -> None:
    """Take the first token that the grammar allows, so many times."""
    made = grammar_of(StructuredOutput(grammar=grammar))
    guide = GrammarGuide(LLMatcher(VOCABULARY, made, log_level=0), "structured.grammar")
    row = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)
    for _ in range(num_tokens):
        guide.fill_mask(row)
        guide.accept(next(i for i in range(VOCAB_SIZE) if row[i // 32].item() >> i % 32 & 1))


def test_a_rule_that_never_ends_fails_where_it_leaves_no_choice() -> None:
    for grammar in ('start: "a" start', 'start: start "a"'):
        with pytest.raises(GrammarTooComplex, match="too complex within the answer"):
            follow(grammar, 2)
    follow('start: "a"* b\nb: "b" b', 100)
