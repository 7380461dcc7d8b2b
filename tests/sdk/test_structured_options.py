"""Callers say what an answer must look like, and what cannot be is refused before it is queued."""

import json
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tidemill import JobSpec, Result, StructuredOutput, Usage
from tidemill.openai.response_format import structured_fields
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import GenerateRequest
from tidemill.protocol.states import JobState


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Mill(BaseModel):
    """A pydantic model with a reference, an enumeration and a default."""

    name: str
    size: Size
    wheels: list[int] = []


def structured_of(**options: Any) -> StructuredOutput | None:
    request = JobSpec("hi", **options).draft("default").request
    assert isinstance(request, GenerateRequest)
    return request.structured


def test_a_job_is_free_text_by_default() -> None:
    assert structured_of(max_tokens=3) is None
    assert structured_of(structured=None, json_schema=None) is None


@pytest.mark.parametrize(
    "structured",
    [StructuredOutput(regex="a+"), {"regex": "a+"}, {"regex": "a+", "strict": True}],
)
def test_a_constraint_is_given_whole_or_by_its_fields(structured: Any) -> None:
    assert structured_of(structured=structured) == StructuredOutput(regex="a+")


def test_a_schema_alone_is_enough() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for given in (schema, json.dumps(schema)):
        made = structured_of(json_schema=given)
        assert made is not None and made.strict
        assert json.loads(made.json_schema or "") == schema


def test_a_pydantic_model_is_a_schema_and_reads_the_answer() -> None:
    made = structured_of(json_schema=Mill)
    assert made is not None
    assert json.loads(made.json_schema or "") == Mill.model_json_schema()
    text = '{"name": "Tide", "size": "large", "wheels": [3]}'
    result = Result("job-1", JobState.DONE, text, (1,), "stop", None, Usage())
    assert result.parsed(Mill) == Mill(name="Tide", size=Size.LARGE, wheels=[3])
    cut_off = Result("job-1", JobState.DONE, text[:9], (1,), "length", None, Usage())
    with pytest.raises(ValidationError):
        cut_off.parsed(Mill)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structured": {"json": {}, "regex": "a"}}, "structured: exactly one of"),
        ({"structured": {"regexp": "a"}}, "structured.regexp: "),
        ({"structured": {"choice": []}}, "structured.choice: "),
        ({"structured": "json"}, "structured: str is not StructuredOutput"),
        ({"structured": {"regex": "a"}, "json_schema": {}}, "json_schema: the answer has another"),
        ({"json_schema": "{"}, "structured.json_schema: it is not JSON"),
        ({"json_schema": {"not": {}}}, "structured.json_schema: 'not' cannot be enforced"),
        ({"structured": {"regex": "("}}, "structured.regex: "),
        ({"structured": {"grammar": "start: other"}}, "structured.grammar: "),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_queued(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structured_of(**options)
    assert message in caught.value.message


def test_a_lenient_schema_may_have_keywords_that_are_not_enforced() -> None:
    made = structured_of(structured={"json": {"not": {}}, "strict": False})
    assert made is not None and not made.strict


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            {"json_schema": {}, "strict": True},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": False, "schema": {"a": 1}},
                }
            },
            {"json_schema": {"a": 1}, "strict": False},
        ),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ],
)
def test_the_forms_of_other_clients_are_understood(
    body: dict[str, Any], fields: dict[str, Any] | None
) -> None:
    assert structured_fields(body) == fields


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": []}, "structured_outputs"),
        (
            {"structured_outputs": {}, "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_what_other_clients_cannot_mean_is_refused_by_field(
    body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structured_fields(body)
    assert caught.value.field == field
