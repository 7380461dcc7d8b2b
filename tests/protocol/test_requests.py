"""The kinds of jobs on the wire, and what they leave behind."""

import struct

import pytest
from pydantic import ValidationError

from tidemill.protocol.codec import decode, encode, pack
from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.messages import GenerateRequest, JobEnd, JobResult
from tidemill.protocol.outcomes import Outcome, Segment, Transcript, Vectors, Word
from tidemill.protocol.requests import (
    MAX_AUDIO_BYTES,
    MAX_INPUTS,
    EmbedRequest,
    Request,
    ScoreRequest,
    TranscribeRequest,
    decode_request,
    serves,
)

REQUESTS: list[Request] = [
    GenerateRequest(model="m", prompt="Hi"),
    EmbedRequest(model="m", inputs=("a cat", (1, 2, 3)), dimensions=8, normalize=False),
    ScoreRequest(model="m", query="what", documents=("this", "that"), tenant="t", priority=1),
    TranscribeRequest(model="m", audio=b"\xffOggS", language="en", timestamps="word"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.kind)
def test_a_request_of_any_kind_survives_the_wire(request_: Request) -> None:
    assert decode_request(encode(request_)) == request_


def test_a_request_without_a_kind_is_one_of_generate() -> None:
    data = b"\x01" + pack({"model": "m", "prompt": "Hi"})
    assert decode_request(data) == GenerateRequest(model="m", prompt="Hi")


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(MalformedMessage, match="kind: 'paint'"):
        decode_request(b"\x01" + pack({"kind": "paint", "model": "m"}))


@pytest.mark.parametrize("body", [[1, 2], "text", {"kind": "embed", "model": "m"}])
def test_what_is_no_request_is_malformed(body: object) -> None:
    with pytest.raises(MalformedMessage):
        decode_request(b"\x01" + pack(body))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (EmbedRequest, {"inputs": ()}),
        (EmbedRequest, {"inputs": ("",)}),
        (EmbedRequest, {"inputs": ("x",) * (MAX_INPUTS + 1)}),
        (EmbedRequest, {"inputs": ("x",), "dimensions": 0}),
        (ScoreRequest, {"query": "", "documents": ("x",)}),
        (TranscribeRequest, {"audio": bytes(MAX_AUDIO_BYTES + 1)}),
        (TranscribeRequest, {"audio": "text"}),
        (TranscribeRequest, {"audio": b"x", "language": "English"}),
        (TranscribeRequest, {"audio": b"x", "temperature": 1.5}),
        (TranscribeRequest, {"audio": b"x", "prompt_ids": (1,)}),
    ],
)
def test_a_request_outside_the_limits_cannot_be_made(
    kind: type[Request], fields: dict[str, object]
) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate({"model": "m", **fields})


def test_vectors_are_packed_as_little_endian_float32() -> None:
    vectors = Vectors.of([[1.0, -2.5], [0.25, 3.0]], 2)
    assert vectors.data == struct.pack("<4f", 1.0, -2.5, 0.25, 3.0)
    assert vectors.rows() == [(1.0, -2.5), (0.25, 3.0)]


def test_vectors_whose_bytes_do_not_fit_their_shape_are_refused() -> None:
    with pytest.raises(ValidationError, match="7 bytes"):
        Vectors(num_rows=1, size=2, data=bytes(7))


def test_a_result_carries_what_its_kind_was_for() -> None:
    words = (Word(text=" so", start=0.5, end=0.75, probability=0.5),)
    segments = (Segment(text=" so", start=0.0, end=2.5, mean_logprob=-0.25, words=words),)
    outcomes = [
        Outcome(vectors=Vectors.of([[0.5]], 1), input_tokens=3),
        Outcome(scores=(0.5, -1.0)),
        Outcome(transcript=Transcript(language="en", seconds=11.0, segments=segments)),
    ]
    for outcome in outcomes:
        result = JobResult(end=JobEnd(state="done"), outcome=outcome)
        assert decode(encode(result), JobResult) == result


def test_a_model_serves_the_kinds_that_its_task_stands_for() -> None:
    served = {
        task: [kind for kind in ("generate", "embed", "score", "transcribe") if serves(task, kind)]
        for task in ("generate", "embed", "score", "transcribe")
    }
    assert served == {
        "generate": ["generate"],
        "embed": ["embed", "score"],
        "score": ["score"],
        "transcribe": ["transcribe"],
    }
