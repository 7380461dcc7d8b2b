"""The wire format: round trips, bounds and versions."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tidemill.protocol.codec import (
    MAX_MESSAGE_BYTES,
    MAX_RESULT_BYTES,
    WIRE_VERSION,
    decode,
    encode,
)
from tidemill.protocol.errors import MalformedMessage, UnsupportedVersion
from tidemill.protocol.messages import (
    ChatMessage,
    GenerateRequest,
    JobEnd,
    JobResult,
    TokenChunk,
    WorkerStatus,
    invalid_request,
)
from tidemill.protocol.sampling import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 10_000),
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 1000),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=20), max_size=16).map(tuple),
    ignore_eos=st.booleans(),
)


@given(PARAMS, st.text(min_size=1, max_size=300), st.integers(-(2**31), 2**31 - 1))
def test_a_request_survives_the_wire(params: SamplingParams, prompt: str, priority: int) -> None:
    request = GenerateRequest(model="m", prompt=prompt, params=params, priority=priority)
    assert request == decode(encode(request), GenerateRequest)


def test_a_result_survives_the_wire() -> None:
    result = JobResult(
        end=JobEnd(state="done", finish_reason="stop", stop_reason="\n"),
        ids=(1, 2, 3),
        text="aé🙂",
        entries=((1, 1), (3, 3)),
    )
    assert result == decode(encode(result), JobResult)


def test_the_result_of_a_very_long_generation_can_be_read_again() -> None:
    ids = tuple(range(100_000, 250_000))
    entries = tuple((end, end) for end in range(1, len(ids), 4))
    result = JobResult(end=JobEnd(state="done"), ids=ids, text="word " * 150_000, entries=entries)
    data = encode(result)
    assert len(data) > MAX_MESSAGE_BYTES
    assert decode(data, JobResult, max_bytes=MAX_RESULT_BYTES) == result


def test_the_first_byte_is_the_version_and_the_rest_is_a_msgpack_map() -> None:
    data = encode(TokenChunk(start=0, end=1, ids=(5,), text="x"))
    assert data[0] == WIRE_VERSION
    assert msgpack.unpackb(data[1:]) == {"start": 0, "end": 1, "ids": [5], "text": "x"}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedMessage),
        (b"\x07\x80", UnsupportedVersion),
        (b"\x01\xc1", MalformedMessage),
        (b"\x01\x93\x01\x02\x03", MalformedMessage),
        (b"\x01" + msgpack.packb({"start": 0, "end": 1, "surprise": 1}), MalformedMessage),
        (b"\x01" + msgpack.packb({"start": -1, "end": 1}), MalformedMessage),
        (b"\x01" + msgpack.packb({1: 2}), MalformedMessage),
        (b"\x01" + msgpack.packb({"start": 0, "end": 1}) + b"\x00", MalformedMessage),
        (b"\x01" + b"\x91" * 5000, MalformedMessage),
        (b"\x01" + msgpack.packb(msgpack.ExtType(3, b"x")), MalformedMessage),
        (b"\x01" + b"x" * (MAX_MESSAGE_BYTES + 1), MalformedMessage),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(data, TokenChunk)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_but_a_protocol_error(data: bytes) -> None:
    try:
        decode(data, WorkerStatus)
    except (MalformedMessage, UnsupportedVersion):
        return


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_sampling_parameter_is_named(values: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate(values)
    assert field == invalid_request(caught.value).field
    assert str(invalid_request(caught.value)).startswith(f"{field}: ")


def test_half_a_surrogate_pair_in_a_message_is_refused() -> None:
    with pytest.raises(ValidationError, match="surrogate"):
        ChatMessage(role="user", content="caf\udce9")


@pytest.mark.parametrize(
    "prompts",
    [{}, {"prompt": ""}, {"prompt_ids": []}, {"prompt": "a", "prompt_ids": [1]}, {"messages": []}],
)
def test_a_request_needs_exactly_one_non_empty_prompt(prompts: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GenerateRequest.model_validate({"model": "m", **prompts})
