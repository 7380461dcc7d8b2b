"""Calls that a model must make are calls, whatever the model would rather write."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest

from support.guided_engine import ended_by_itself, guided_seq, noisy_engine, run_all, text_of
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.openai.deltas import Delta
from tidemill.openai.forced_calls import MAX_FORCED_CALLS, ForcedCallParser, forced_calls
from tidemill.openai.tools import Tool
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler, grammar_compiler

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size

TOOLS = (
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Zürich"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "draw",
        parameters={
            "type": "object",
            "properties": {"shape": {"$ref": "#/$defs/shape"}},
            "required": ["shape"],
            "$defs": {
                "shape": {
                    "type": "object",
                    "properties": {
                        "kind": {"enum": ["dot", "group"]},
                        "parts": {
                            "type": "array",
                            "maxItems": 1,
                            "items": {"$ref": "#/$defs/shape"},
                        },
                    },
                    "required": ["kind"],
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
    ),
    Tool("get_time"),
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    assert made is not None
    yield made
    made.close()


def parse(text: str, seed: int) -> Delta:
    parser, random, told = ForcedCallParser(), Random(seed), Delta()
    while text:
        length = random.randint(1, 9)
        told += parser.feed(text[:length])
        text = text[length:]
    return told + parser.finish()


def outputs(compiler: GrammarCompiler, tools: tuple[Tool, ...], *, is_parallel: bool) -> list[str]:
    structured = forced_calls(tools, is_parallel=is_parallel)
    seqs = [
        guided_seq(compiler, structured, seq_id=f"forced-{seed}", seed=seed, max_tokens=1800)
        for seed in range(12)
    ]
    told = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), seqs)
    return [text_of(steps) for steps in told.values() if ended_by_itself(steps)]


@pytest.mark.parametrize("is_parallel", [True, False])
def test_every_output_is_calls_of_offered_tools_with_valid_arguments(
    compiler: GrammarCompiler, is_parallel: bool
) -> None:
    schemas: dict[str, Any] = {tool.name: {"type": "object", **tool.parameters} for tool in TOOLS}
    texts = outputs(compiler, TOOLS, is_parallel=is_parallel)
    assert len(texts) >= 10
    names = set()
    for seed, text in enumerate(texts):
        told = parse(text, seed)
        assert not told.content and not told.reasoning
        assert 1 <= len(told.tool_calls) <= (MAX_FORCED_CALLS if is_parallel else 1)
        assert len(told.tool_calls) == len(json.loads(text))
        for call in told.tool_calls:
            names.add(call.name)
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert names == {"get_weather", "draw", "get_time"}


def test_arguments_have_no_properties_that_the_tool_does_not_name(
    compiler: GrammarCompiler,
) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    texts = outputs(compiler, (Tool("get_weather", parameters=city),), is_parallel=False)
    calls = [call for text in texts for call in json.loads(text)]
    assert len(calls) >= 10
    assert all(call["arguments"] == {"city": "Oslo"} for call in calls)


def test_calls_are_told_one_by_one_as_they_are_whole() -> None:
    parser = ForcedCallParser()
    assert parser.feed('[{"name": "a", "arguments": {"x": "]"}') == Delta()
    assert [call.name for call in parser.feed('}, {"name"').tool_calls] == ["a"]
    assert [call.name for call in parser.feed(': "b", "arguments": {}}').tool_calls] == ["b"]
    assert parser.feed("]") == Delta()
    assert parser.finish() == Delta()


def test_a_forced_call_that_was_cut_off_is_no_call() -> None:
    told = parse('[{"name": "a", "arguments": {}}, {"name": "b", "argu', 0)
    assert [call.name for call in told.tool_calls] == ["a"]


def test_forced_calls_are_strict_only_if_their_tools_are() -> None:
    assert not forced_calls(TOOLS, is_parallel=True).strict
    assert forced_calls([Tool("f", strict=True)], is_parallel=True).strict
    assert not forced_calls([Tool("f", strict=True), Tool("g")], is_parallel=True).strict
