"""What callers are told of values that are not right: their own words, none of a library's."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from tidemill._request import JobSpec
from tidemill.gateway.errors import api_error
from tidemill.job_kinds import EmbedSpec, ScoreSpec, TranscribeSpec
from tidemill.protocol.codec import WIRE_VERSION, pack
from tidemill.protocol.errors import InvalidRequest, MalformedMessage
from tidemill.protocol.requests import decode_request

INNER_WORDS = ("function-", " at 0x", "constrained-", "pydantic", "Value error", "validat", "uple")

Make = Callable[[], Any]
EMBED, SCORE, SPEECH = EmbedSpec, ScoreSpec, TranscribeSpec


def generate(prompt: Any, **options: Any) -> JobSpec:
    return JobSpec(prompt, **options)


WRONG: list[tuple[Make, str]] = [
    (lambda: EMBED(""), "inputs.0: it is empty"),
    (lambda: EMBED(["tide", ""]), "inputs.1: it is empty"),
    (lambda: EMBED([]), "inputs: it is empty"),
    (lambda: EMBED([["a"]]), "inputs.0.0: Input should be a valid integer"),  # type: ignore[arg-type]
    (lambda: EMBED([[-1]]), "inputs.0.0: Input should be greater than or equal to 0, got -1"),
    (lambda: EMBED(["\ud800"]), "inputs.0: it holds half of a surrogate pair"),
    (lambda: EMBED("a", dimensions=0), "dimensions: Input should be greater"),
    (lambda: EMBED("a", dimensions=object()), "dimensions: Input should be a valid integer, got a"),  # type: ignore[arg-type]
    (lambda: SCORE("", ["a"]), "query: it is empty"),
    (lambda: SCORE("q", ["a", ""]), "documents.1: it is empty"),
    (lambda: SCORE("q", ["a"] * 2049), "documents: it has 2049 items, the limit is 2048"),
    (lambda: SPEECH(b""), "audio: it is empty"),
    (lambda: SPEECH(b"a", prompt="p" * 4097), "prompt: it has 4097 characters, the limit is 4096"),
    (lambda: SPEECH(b"a", language="english"), "language: "),
    (lambda: SPEECH(b"a", priority=10**5000), "priority: "),
    (lambda: SPEECH(b"a", model="m" * 257), "model: it has 257 characters, the limit is 256"),
    (lambda: generate("a", cache_salt=""), "cache_salt: it is empty"),
    (lambda: generate("a", stop=[""]), "stop.0: it is empty"),
    (lambda: generate("a", seed=10**5000), "seed: "),
    (lambda: generate("a", structured={"choice": []}), "structured.choice: it is empty"),
]


@pytest.mark.parametrize(("make", "told"), WRONG, ids=[told for _, told in WRONG])
def test_a_refusal_names_the_field_and_no_inner_part(make: Make, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec: JobSpec = make()
        spec.draft("default")
    assert told in caught.value.message
    check(caught.value.message)
    assert "." not in caught.value.field or caught.value.field.split(".")[0].isidentifier()


def test_a_message_on_the_wire_is_refused_without_its_values() -> None:
    data = bytes([WIRE_VERSION]) + pack({"kind": "embed", "model": "m", "inputs": ["", "secret"]})
    with pytest.raises(MalformedMessage, match=r"EmbedRequest: inputs\.0: ") as caught:
        decode_request(data)
    check(caught.value.message)
    assert "secret" not in caught.value.message and "got" not in caught.value.message


def test_the_gateway_tells_the_member_of_a_union_that_was_meant() -> None:
    union = "function-after[functools.partial(<function check at 0x7f5a>)(), str]"
    error = RequestValidationError(
        [
            {
                "loc": ("body", "input", union),
                "type": "string_type",
                "msg": "no string",
                "input": [0, 1, 2, 0.5],
            },
            {
                "loc": ("body", "input", "list[int]", 3),
                "type": "int_type",
                "msg": "no integer",
                "input": 0.5,
            },
        ]
    )
    told = api_error(error)
    assert told.message == "input.3: no integer, got 0.5"
    assert told.param == "input.3"


def check(message: str) -> None:
    assert not any(word in message for word in INNER_WORDS), message
