"""Answers that end satisfy the schemas they were asked to satisfy, judged by ``jsonschema``."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex  # type: ignore[import-untyped]  # has no types
from jsonschema.protocols import Validator

from support.guided_engine import ended_by_itself, guided_seq, noisy_engine, run_all, text_of
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler, grammar_compiler

SCHEMAS = Path(__file__).parents[1] / "data" / "json_schemas.jsonl"
#: Files of the suite whose schemas `make test` tries; `make slow` tries all.
SLICE = frozenset({"additionalProperties", "allOf", "anyOf", "enum", "items", "pattern"})
NUM_OUTPUTS = 3

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size


def read_schemas(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    lines = map(json.loads, SCHEMAS.read_text().splitlines())
    return [case for case in lines if wanted(case["file"])]


def ecma_pattern(
    validator: Validator, pattern: str, instance: object, schema: object
) -> Iterator[jsonschema.ValidationError]:
    # The schemas use \p{...}, which Python's own module does not know.
    if isinstance(instance, str) and not regex.search(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def ecma_pattern_properties(
    validator: Validator, patterns: dict[str, Any], instance: object, schema: object
) -> Iterator[jsonschema.ValidationError]:
    for pattern, subschema in patterns.items():
        for name, value in instance.items() if isinstance(instance, dict) else ():
            if regex.search(pattern, name):
                yield from validator.descend(value, subschema, path=name)


JUDGE = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {"pattern": ecma_pattern, "patternProperties": ecma_pattern_properties},
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    assert made is not None
    yield made
    made.close()


def outputs(compiler: GrammarCompiler, case: dict[str, Any]) -> list[str]:
    """The texts of three seeded answers, all of which end."""
    structured = StructuredOutput(json_schema=case["schema"])
    seqs = [
        guided_seq(
            compiler,
            structured,
            seq_id=f"{case['file']}/{case['description']}/{seed}",
            seed=seed,
            max_tokens=1500,
        )
        for seed in range(NUM_OUTPUTS)
    ]
    told = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), seqs)
    assert all(ended_by_itself(steps) for steps in told.values()), case
    return [text_of(steps) for steps in told.values()]


def check_all(compiler: GrammarCompiler, cases: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many schemas were accepted and how many refused, each by a keyword it has."""
    num_accepted = num_refused = 0
    for case in cases:
        try:
            texts = outputs(compiler, case)
        except InvalidRequest as error:
            num_refused += 1
            check_refusal(error, case["schema"])
            continue
        num_accepted += 1
        for text in texts:
            found = next(JUDGE(case["schema"]).iter_errors(json.loads(text)), None)
            assert found is None, f"{case}: {text}: {found}"
    return num_accepted, num_refused


def check_refusal(error: InvalidRequest, schema: object) -> None:
    assert error.field == "structured.json_schema"
    assert error.fix
    told = json.dumps(schema)
    # The metaschema, which the library knows, has keywords of its own.
    is_metaschema = '"$ref": "https://json-schema.org' in told
    if "cannot be enforced" in error.message and not is_metaschema:
        named = error.message.removesuffix(" cannot be enforced").split(": ", 1)[1]
        for keyword in named.split(", "):
            # '"format: iri"' names a keyword's value too.
            assert f'"{keyword.strip(chr(39)).split(":")[0]}":' in told


def test_answers_satisfy_their_schemas(compiler: GrammarCompiler) -> None:
    cases = read_schemas(SLICE.__contains__)
    accepted, refused = check_all(compiler, cases)
    assert accepted >= 30
    assert accepted + refused == len(cases)


@pytest.mark.slow
def test_answers_satisfy_all_schemas_of_the_suite_that_are_accepted(
    compiler: GrammarCompiler,
) -> None:
    cases = read_schemas(lambda file: True)
    accepted, refused = check_all(compiler, cases)
    assert accepted >= 169
    assert accepted + refused == len(cases)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "'not'"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "'oneOf'"),
        ({"uniqueItems": True}, "'uniqueItems'"),
        ({"if": {}, "then": {}}, "'if', 'then'"),
        ({"properties": {"a": {"contains": {}}}}, "'contains'"),
        ({"type": "string", "format": "iri"}, "'format: iri'"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "'not'"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(
    compiler: GrammarCompiler, schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guided_seq(compiler, StructuredOutput(json_schema=schema))
    assert f"structured.json_schema: {keyword} cannot be enforced" in caught.value.message
    assert "strict=false" in caught.value.fix


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "no value satisfies it"),
        ({"type": "string", "minLength": 9, "maxLength": 3}, "Unsatisfiable"),
        ({"$ref": "https://example.com/other.json"}, "is not present"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"type": "colour"}, "colour"),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused_with_the_reason(
    compiler: GrammarCompiler, schema: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        guided_seq(compiler, StructuredOutput(json_schema=schema))
    assert caught.value.field == "structured.json_schema"


def test_a_lenient_schema_enforces_what_it_can(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "not": {"const": 3}}},
        "required": ["n"],
        "additionalProperties": False,
    }
    structured = StructuredOutput(json_schema=schema, strict=False)
    told = run_all(
        noisy_engine(TOKENIZER, VOCAB_SIZE), [guided_seq(compiler, structured, max_tokens=500)]
    )
    assert isinstance(json.loads(text_of(told["seq"]))["n"], int)
