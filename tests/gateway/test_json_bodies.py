"""Long bodies are read as short ones are, but for what is no JSON."""

import json
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from fastapi.routing import APIRoute

from gateway.conftest import Site
from tidemill.gateway import json_bodies
from tidemill.gateway.app import ROUTERS
from tidemill.gateway.json_bodies import LONG_BYTES, JsonRoute, read_json

PADDING = " " * LONG_BYTES

VALUES: list[Any] = [
    {"a": [1, -5, 2.5, 1e-300, True, None, "\U0001f600 \u00e9"], "": {"b": {}}},
    *([number] for number in (2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, -(10**30))),
    [0.1234567890123456789, 1e22, "12345678901234567890123"],
    {"a" * 1000: ["b" * 1000] * 100},
]


@pytest.mark.parametrize("value", VALUES)
async def test_a_long_body_says_the_same_as_a_short_one(value: Any) -> None:
    text = json.dumps(value)
    for body in (text, text + PADDING):
        found = await read_json(body.encode())
        # Also whether a number is an integer.
        assert json.dumps(found) == text


async def test_values_of_long_bodies_are_not_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(json_bodies.json, "loads")
    numbers = list(range(LONG_BYTES))
    assert await read_json(orjson.dumps(numbers)) == numbers


@pytest.mark.parametrize("wrong", ['["\\ud800"]', "[NaN]", "[1,]", '{"a": 1', "[" * 2000])
async def test_what_is_no_json_is_refused_with_where_it_is(wrong: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=r"line 1 column \d+"):
        await read_json((wrong + PADDING).encode())


def test_every_route_with_a_body_reads_it_so() -> None:
    routes = [route for router in ROUTERS for route in router.routes]
    with_body = [route for route in routes if isinstance(route, APIRoute) and route.body_field]
    assert len(with_body) > 10
    assert [route.path for route in with_body if not isinstance(route, JsonRoute)] == []


@pytest.mark.parametrize(
    ("wrong", "told", "code"),
    [
        ("1" * 30, "unknown.0: it is an integer of more than 64 bits", "invalid_value"),
        ("[" * 300 + "]" * 300, "unknown.0.0.", "invalid_value"),
        ('"\\ud800"', "the body is not JSON: ", "invalid_json"),
    ],
)
def test_what_nothing_can_hold_is_refused_in_long_bodies_too(
    site: Site, wrong: str, told: str, code: str
) -> None:
    body = f'{{"prompt": "x", "unknown": [{wrong}]{PADDING}}}'.encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{site.url}/v1/completions", content=body, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == code
    assert error["message"].startswith(told)
