"""Jobs wait for their grammars outside the engine, and nobody waits for them."""

import threading
from collections.abc import Iterator
from typing import cast

import pytest
from llguidance import LLMatcher

from support.grammar_stage import VOCABULARY, GrammarStage, Record
from support.guided_engine import NoisyRunner
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.grammar import grammar_of
from tidemill_gpuworker.shell.job_runner import JobRunner
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler
from tidemill_gpuworker.structured_output.desk import GrammarDesk


class SlowCompiler:
    """Compiles one pattern at a time, each when the test says so, and counts."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.num_built = 0
        self.now = 0.0

    def build(self, structured: StructuredOutput) -> LLMatcher:
        self.has_begun.set()
        assert self.may_end.wait(20)
        self.num_built += 1
        return LLMatcher(VOCABULARY, grammar_of(structured))

    def clock(self) -> float:
        return self.now


class Stage(GrammarStage):
    """A job runner whose compiler is held back."""

    def __init__(self) -> None:
        self.slow = SlowCompiler()
        super().__init__(self.slow.build, self.slow.clock)

    def let_compile(self) -> None:
        self.slow.may_end.set()
        assert self.woken.wait(20)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.slow.may_end.set()
    made.compiler.close()


def test_a_slow_compilation_delays_no_step_of_another_job(stage: Stage) -> None:
    stage.admit("guided", regex="ab+")
    stage.admit("plain", num_tokens=30)
    assert stage.slow.has_begun.wait(20)
    assert stage.runner.num_held == 1
    for num_steps in range(1, 31):
        stage.runner.step()
        assert stage.record.num_tokens("plain") == num_steps
    assert stage.record.end("plain").state == "done"
    assert cast(NoisyRunner, stage.engine._runner).num_steps == 30
    assert stage.record.num_tokens("guided") == 0
    stage.let_compile()
    stage.run_until(lambda: not stage.runner.has_work)
    assert stage.record.text("guided").startswith("ab")


def test_a_worker_with_nothing_but_waiting_jobs_has_no_step_to_make(stage: Stage) -> None:
    stage.admit("guided", regex="a")
    assert stage.runner.has_work and not stage.runner.can_step
    stage.let_compile()
    assert stage.runner.can_step
    stage.run_until(lambda: not stage.runner.has_work)
    assert stage.record.text("guided") == "a"
    assert not stage.runner.can_step


def test_a_constraint_is_compiled_once(stage: Stage) -> None:
    for number in range(5):
        stage.admit(f"job-{number}", regex="ab")
    stage.let_compile()
    stage.run_until(lambda: not stage.runner.has_work)
    stage.admit("later", regex="ab")
    stage.run_until(lambda: not stage.runner.has_work)
    assert stage.slow.num_built == 1
    assert {stage.record.text(job_id) for job_id in stage.record.updates} == {"ab"}


def test_a_job_whose_grammar_takes_too_long_fails_for_good(stage: Stage) -> None:
    stage.admit("guided", regex="a")
    assert stage.slow.has_begun.wait(20)
    stage.slow.now = 9.9
    assert not stage.runner.can_step
    stage.slow.now = 10.1
    stage.run_until(lambda: not stage.runner.has_work)
    end = stage.record.end("guided")
    assert end.state == "failed"
    assert "structured.regex: it took more than 10 s to compile" in end.error


def test_an_unsupported_constraint_fails_its_job_alone(stage: Stage) -> None:
    compiler = GrammarCompiler(VOCABULARY)
    woken = threading.Event()
    stage.runner._grammars = GrammarDesk(compiler, wake=woken.set)
    stage.admit("plain", num_tokens=5)
    stage.admit("guided", regex="(?=a)")
    # It may be refused before anybody could wait for it.
    assert not stage.runner.num_held or woken.wait(20)
    stage.run_until(lambda: not stage.runner.has_work)
    assert stage.record.end("plain").state == "done"
    end = stage.record.end("guided")
    assert end.state == "failed"
    assert end.error.startswith("structured.regex: ") and "look-around" in end.error
    compiler.close()


def test_a_job_that_is_abandoned_while_it_waits_leaves_nothing(stage: Stage) -> None:
    claim = stage.admit("guided", regex="a")
    stage.runner.abandon(claim.job)
    assert not stage.runner.has_work and stage.runner.num_held == 0
    stage.let_compile()
    assert not stage.runner.can_step
    assert [left.job_id for left in stage.runner.take_departed()] == ["guided"]


def test_a_worker_without_grammars_refuses_by_name() -> None:
    record = Record()
    stage = Stage()
    stage.runner = JobRunner(
        stage.engine, cast(Publisher, record), lambda job, reason: None, grammars=GrammarDesk(None)
    )
    stage.admit("guided", regex="a")
    assert not stage.runner.has_work
    assert record.end("guided").error.startswith("structured: this worker cannot enforce")
