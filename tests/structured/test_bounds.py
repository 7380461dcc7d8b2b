"""What a constraint may cost: much of it is refused by name, the rest ends within its bounds."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.tiny_tokenizers import byte_level_tokenizer
from support.wait import wait_until
from tidemill._structured import take_structured
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill.service import grammar
from tidemill.service.grammar import MAX_MULTIPLE, grammar_of
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler, grammar_compiler
from tidemill_gpuworker.structured_output.trial import GrammarTrial, Vocabulary

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER.raw.to_str(), TOKENIZER.vocab_size, list(TOKENIZER.eos_token_ids))
#: Each of its multiples is within bounds; together they take a minute.
COMMON_MULTIPLE = {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991)]}


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(TOKENIZER, TOKENIZER.vocab_size)
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    made = GrammarTrial(VOCABULARY, work_seconds=0.5)
    yield made
    made.close()


@pytest.mark.parametrize(
    "multiple", [MAX_MULTIPLE + 1, 1_000_003, 123_456_789, 0.123457, 10**30 + 1]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_multiple_that_takes_minutes_is_refused_before_it_is_queued(
    multiple: float, strict: bool
) -> None:
    schema = {"properties": {"a": {"items": {"anyOf": [{"multipleOf": multiple}]}}}}
    with pytest.raises(InvalidRequest, match=r"^structured\.json_schema: multipleOf: ") as caught:
        take_structured({"structured": {"json_schema": schema, "strict": strict}})
    assert "100,000" in caught.value.fix


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 1000},
        {"multipleOf": 10**9},
        {"multipleOf": 0.01},
        {"const": {"multipleOf": 1_000_003}},
        {"properties": {"multipleOf": {"type": "integer"}}},
    ],
)
def test_a_multiple_that_costs_little_is_accepted(schema: Any) -> None:
    assert take_structured({"json_schema": schema}) is not None


def test_what_takes_too_much_work_is_ended_and_named(compiler: GrammarCompiler) -> None:
    heavy = compiler.compile(StructuredOutput(json_schema=COMMON_MULTIPLE))
    with pytest.raises(InvalidRequest, match="more than 2 s of work to compile") as caught:
        heavy.future.result(timeout=90)
    assert caught.value.field == "structured.json_schema"
    assert "simpler" in caught.value.fix


def test_what_takes_too_much_memory_is_ended_and_named() -> None:
    tight = GrammarTrial(VOCABULARY, work_seconds=60, memory_bytes=16 << 20)
    heavy = grammar_of(StructuredOutput(json_schema=COMMON_MULTIPLE))
    assert "more than 16 MiB of memory" in tight.complaint(heavy)
    assert tight.complaint(grammar_of(StructuredOutput(regex="ab"))) == ""
    tight.close()


def test_a_grammar_behind_a_costly_one_is_compiled(trial: GrammarTrial) -> None:
    heavy = grammar_of(StructuredOutput(json_schema=COMMON_MULTIPLE))
    assert "more than 0.5 s of work" in trial.complaint(heavy)
    assert trial.complaint(grammar_of(StructuredOutput(regex="ab+"))) == ""


def test_a_trial_whose_process_was_killed_starts_another(trial: GrammarTrial) -> None:
    light = grammar_of(StructuredOutput(regex="ab+"))
    assert trial.complaint(light) == ""
    process = trial._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert trial.complaint(light) == "the process that compiles it has died"
    assert trial.complaint(light) == ""


def test_a_trial_that_says_nothing_is_given_up(trial: GrammarTrial) -> None:
    light = grammar_of(StructuredOutput(regex="ab+"))
    assert trial.complaint(light) == ""
    trial._wait_seconds = 0.05
    assert trial._process is not None
    os.kill(trial._process.pid, signal.SIGSTOP)
    assert trial.complaint(light) == "it took more than 0.05 s to compile"


def test_a_closed_compiler_leaves_no_process(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutput(regex="ab")).future.result(timeout=60)
    trial = compiler._trial
    assert trial is not None and trial._process is not None
    process = trial._process
    compiler.close()
    assert process.returncode == -signal.SIGKILL


def test_a_grammar_with_special_tokens_of_the_model_is_tried_too(trial: GrammarTrial) -> None:
    special = TOKENIZER.raw.id_to_token(TOKENIZER.eos_token_ids[0])
    heavy = StructuredOutput(grammar=f"start: {special} n\nn: %json " + json.dumps(COMMON_MULTIPLE))
    assert "0.5 s of work" in trial.complaint(grammar_of(heavy))


def test_a_long_schema_is_left_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def examined(structured: StructuredOutput) -> str:
        raise AssertionError("it takes seconds")

    monkeypatch.setattr(grammar, "_complaint", examined)
    schema: dict[str, Any] = {"properties": {f"property{number}": {} for number in range(5000)}}
    assert take_structured({"json_schema": schema}) is not None


@pytest.mark.parametrize(
    "structured",
    [
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"regex": r"[^\s\S]"},
        {"grammar": "start: x\nx: x"},
    ],
)
def test_what_nothing_satisfies_is_refused_in_plain_words(
    compiler: GrammarCompiler, structured: dict[str, Any]
) -> None:
    asked = StructuredOutput.model_validate(structured)
    with pytest.raises(InvalidRequest, match="no finite answer satisfies it") as caught:
        compiler.compile(asked).future.result(timeout=60)
    assert caught.value.field == f"structured.{asked.constraint}"
    assert "verbose" not in caught.value.one_line()


def test_closing_does_not_wait_for_what_is_compiled() -> None:
    slow = GrammarTrial(VOCABULARY, work_seconds=1000)
    heavy = grammar_of(StructuredOutput(json_schema=COMMON_MULTIPLE))
    light = grammar_of(StructuredOutput(regex="a"))
    assert slow.complaint(light) == ""
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(slow.complaint(heavy)))
    thread.start()
    wait_until(lambda: slow._lock.locked())
    slow.close()
    thread.join(30)
    assert told == ["the process that compiles it has died"]
