"""What an entry of the front door may hold."""

import json
from hashlib import sha256
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.codec import MAX_MESSAGE_BYTES, encode
from tidemill.protocol.errors import (
    InvalidRequest,
    MalformedMessage,
    ProtocolError,
    UnsupportedVersion,
)
from tidemill.protocol.messages import GenerateRequest, JobTerms, ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill_scheduler.intake.front_entry import FrontEntry, make_front_job, parse_entry

CARD = ModelCard(
    name="m", revision="r1", tokenizer_digest="0" * 64, max_model_len=512, vocab_size=50_000
)


def parse(body: Any, **fields: bytes) -> FrontEntry:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    entry = {b"v": b"1", b"body": data} | {name.encode(): value for name, value in fields.items()}
    return parse_entry("17-0", entry)


@pytest.mark.parametrize("pack", [msgpack.packb, lambda value: json.dumps(value).encode()])
def test_json_and_msgpack_say_the_same(pack: Any) -> None:
    body = {
        "request": {
            "model": "m",
            "prompt": "tide",
            "params": {"seed": 1, "stop": ["\n"]},
            "prefix_id": "p",
        },
        "terms": {"delay_ms": 5},
        "idempotency_key": "k",
    }

    entry = parse(pack(body))

    assert entry.request.params.stop == ("\n",)
    assert make_front_job(entry, CARD, "00").request.prefix_id == "p"
    assert (entry.model, entry.terms.delay_ms, entry.idempotency_key) == ("m", 5, "k")
    assert entry.lane == "default m"


def test_what_an_entry_leaves_out_has_the_models_default() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_k=20, max_tokens=7)
    card = CARD.model_copy(update={"sampling_defaults": defaults})
    entry = parse({"request": {"prompt_ids": [1, 2], "params": {"temperature": 1.0}}})

    job = make_front_job(entry, card, "00")

    assert job.request.params == SamplingParams(top_k=20, max_tokens=7)
    assert job.max_output == 7


def test_an_entry_without_a_key_is_its_own_key() -> None:
    entry = parse({"request": {"prompt": "tide"}})

    assert (entry.model, entry.idempotency_key) == (None, "front:17-0")


def test_the_digest_is_that_of_the_same_job_from_the_sdk() -> None:
    entry = parse({"request": {"prompt": "tide"}})
    request = GenerateRequest(model="-", prompt="tide")

    assert entry.body_digest == sha256(encode(request) + encode(JobTerms())).hexdigest()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body: not JSON"),
        (b"\xc1", "not a msgpack message"),
        (b"[]", "not a msgpack message"),
        (b'{"request": ' + b"[" * 100_000, "body: not JSON"),
        (b" " * (MAX_MESSAGE_BYTES + 1), "the limit is"),
        (b'{"request": {"prompt": "x", "priority": ' + b"9" * 5000 + b"}}", "body: not JSON"),
    ],
)
def test_a_body_that_cannot_be_read_is_malformed(body: bytes, message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        parse(body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "request"),
        ({"request": {"prompt": "x"}, "priority": 1}, "priority"),
        ({"request": {"prompt": "x", "colour": 1}}, "request.colour"),
        ({"request": {"prompt": "x", "prompt_ids": [1]}}, "request"),
        ({"request": {"prompt": "x", "params": {"temperature": 3}}}, "request.params.temperature"),
        ({"request": {"prompt": "x", "tenant": "a b"}}, "request.tenant"),
        ({"request": {"prompt": "x"}, "terms": {"delay_ms": -1}}, "terms.delay_ms"),
        ({"request": {"prompt": "x"}, "idempotency_key": ""}, "idempotency_key"),
        ({"request": {"prompt": "x"}, "idempotency_key": "requeue:job"}, "idempotency_key"),
        ({"request": {"prompt": "x"}, "idempotency_key": "front:1-0"}, "idempotency_key"),
        ({"request": {"prompt_ids": [1] * 300_000}}, "request.prompt_ids"),
        ({"request": {"prompt": "x", "kind": "paint"}}, "request.kind"),
    ],
)
def test_a_body_that_is_not_allowed_names_the_field(body: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(body)

    assert refusal.value.field == field or refusal.value.message.startswith(field)


def test_an_unknown_version_is_not_guessed_at() -> None:
    with pytest.raises(UnsupportedVersion, match="v: b'2'"):
        parse({"request": {"prompt": "x"}}, v=b"2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({b"body": b"{}"}, "v: missing"),
        ({b"v": b"1"}, "body: missing"),
        ({b"v": b"1", b"body": b"{}", b"x": b""}, "has the fields v and body only"),
    ],
)
def test_an_entry_has_exactly_its_two_fields(fields: dict[bytes, bytes], message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        parse_entry("17-0", fields)


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(body: bytes) -> None:
    try:
        parse(body)
    except (InvalidRequest, ProtocolError) as error:
        assert error.message


def test_a_job_without_a_seed_counts_against_the_quota_and_is_neither_tokenised_nor_seeded() -> (
    None
):
    entry = parse({"request": {"prompt": "tide" * 10, "params": {"max_tokens": 7}}})

    job = make_front_job(entry, CARD, "0a")

    assert job.request.model == "m"
    assert job.request.params.seed is None
    assert (job.cost, job.routing_key, job.num_tokens, job.max_output) == (0, b"", 17, 7)
    assert job.job_id.startswith("job_0a")


def test_what_the_model_cannot_run_is_refused() -> None:
    entry = parse({"request": {"prompt_ids": [1], "params": {"max_tokens": 1000}}})

    with pytest.raises(InvalidRequest, match="max_tokens"):
        make_front_job(entry, CARD, "00")
