"""What a client left open by not saying anything is closed, and nothing else."""

from typing import Any

import pytest

from tidemill.openai.closed_schemas import closed

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED_CITY = {**CITY, "additionalProperties": False}


def test_objects_are_closed_wherever_they_are() -> None:
    def around(city: dict[str, Any]) -> dict[str, Any]:
        return {
            "properties": {
                "one": city,
                "some": {"type": "array", "items": city},
                "pair": {"prefixItems": [city, {"type": "null"}]},
                "maybe": {"anyOf": [city, {"type": "null"}]},
                "other": {"$ref": "#/$defs/City"},
            },
            "$defs": {"City": city},
        }

    assert closed(around(CITY)) == {**around(CLOSED_CITY), "additionalProperties": False}


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"unevaluatedProperties": True},
        {"patternProperties": {"^x-": {}}},
        {"minProperties": 2},
        {"required": ["city", "country"]},
        {"allOf": [{"properties": {"country": {}}}]},
        {"anyOf": [{"properties": {"country": {}}}]},
        {"if": {"required": ["city"]}, "then": {"required": ["country"]}},
    ],
)
def test_a_schema_that_says_what_else_there_may_be_is_left_as_it_is(more: dict[str, Any]) -> None:
    assert closed({**CITY, **more}) == {**CITY, **more}


def test_an_object_of_any_shape_stays_one() -> None:
    for schema in ({"type": "object"}, {"type": "object", "properties": {}}, {}, True):
        assert closed(schema) == schema


def test_names_and_values_that_look_like_schemas_are_none() -> None:
    named = {"type": "object", "properties": {"properties": CITY}, "required": ["properties"]}
    told = closed({**named, "default": CITY, "enum": [CITY]})
    assert told["properties"] == {"properties": CLOSED_CITY}
    assert told["default"] == CITY and told["enum"] == [CITY]


@pytest.mark.parametrize(
    "both",
    [
        {"allOf": [{"$ref": "#/$defs/City"}, {"required": ["country"]}]},
        {"$ref": "#/$defs/City", "anyOf": [{"required": ["country"]}]},
    ],
)
def test_a_part_of_a_combination_is_left_open(both: dict[str, Any]) -> None:
    schema = {"properties": {"both": both}, "$defs": {"City": CITY}}
    assert closed(schema) == schema
