"""What a request may ask of the form of its answer."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tidemill.protocol.codec import decode, encode
from tidemill.protocol.messages import GenerateRequest, invalid_request
from tidemill.protocol.structured import MAX_CHOICES, MAX_SCHEMA_NESTING, StructuredOutput


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


def refused(**structured: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest(model="m", prompt="x", structured=structured)
    return invalid_request(caught.value).message


def test_a_schema_travels_as_text_with_its_properties_in_order() -> None:
    schema = {"type": "object", "properties": {"zebra": {}, "ant": {"const": "ü"}}}
    request = GenerateRequest(
        model="m",
        prompt="x",
        structured=StructuredOutput(json_schema=schema),
    )
    arrived = decode(encode(request), GenerateRequest)
    assert arrived == request
    assert arrived.structured is not None and arrived.structured.json_schema is not None
    assert list(json.loads(arrived.structured.json_schema)["properties"]) == ["zebra", "ant"]
    assert "ü" in arrived.structured.json_schema


@pytest.mark.parametrize(
    ("structured", "constraint"),
    [
        ({"json_schema": True}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"regex": "[ab]+"}, "regex"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_one_constraint_is_enough(structured: dict[str, Any], constraint: str) -> None:
    assert StructuredOutput.model_validate(structured).constraint == constraint


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({}, "structured: exactly one of"),
        ({"json_object": False}, "structured: exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
        ({"choice": []}, "structured.choice: "),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, "structured.choice: "),
        ({"choice": [""]}, "structured.choice.0: "),
        ({"regex": "a" * 20_000}, "structured.regex: it has 20000 bytes, the limit is 16384"),
        ({"grammar": "a" * 200_000}, "structured.grammar: it has 200000 bytes"),
        ({"json_schema": '"' + "ü" * 200_000 + '"'}, "structured.json_schema: it has 400002 bytes"),
        ({"json_schema": "{"}, "structured.json_schema: it is not JSON"),
        ({"json_schema": "[]"}, "structured.json_schema: a schema is an object or a boolean"),
        ({"json_schema": {"const": object()}}, "structured.json_schema: it is not JSON"),
        ({"json_schema": "[" * 100_000}, "structured.json_schema: it nests deeper"),
        ({"json_schema": {}, "colour": "red"}, "structured.colour: "),
    ],
)
def test_anything_else_is_refused_by_its_field(structured: dict[str, Any], message: str) -> None:
    assert message in refused(**structured)


def test_a_schema_nests_up_to_its_limit_and_no_deeper() -> None:
    StructuredOutput(json_schema=nested(MAX_SCHEMA_NESTING))
    assert "it nests deeper than 64 levels" in refused(json_schema=nested(MAX_SCHEMA_NESTING + 1))
    assert "it nests deeper than 64 levels" in refused(json_schema=nested(100_000))
