"""What an entry of the outbox becomes."""

import json

import pytest
from openai.types.webhooks import UnwrapWebhookEvent
from pydantic import TypeAdapter

from tidemill_webhooks.events import EVENT_TYPES, Event, is_pattern, read_entry, wants

JOB = "job_00" + "0" * 26


def entry(**fields: str) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in fields.items()}


@pytest.mark.parametrize(
    ("state", "reason", "event_type"),
    [
        ("done", "stop", "response.completed"),
        ("done", "length", "response.incomplete"),
        ("failed", "error", "response.failed"),
        ("dead", "error", "response.failed"),
        ("expired", "deadline", "response.failed"),
        ("cancelled", "cancelled", "response.cancelled"),
    ],
)
def test_each_end_of_a_job_has_a_name_of_openais(state: str, reason: str, event_type: str) -> None:
    event = read_entry(entry(j=JOB, s=state, r=reason, tn="acme", t="1700000000123"))
    assert event == Event(f"evt_{JOB[4:]}", event_type, JOB, "acme", 1700000000)


@pytest.mark.parametrize("state", ["completed", "failed", "expired", "cancelled"])
def test_each_end_of_a_batch_has_a_name_of_openais(state: str) -> None:
    event = read_entry(entry(b="batch_1", s=state, tn="acme", t="1700000000123", u="https://a.b/"))
    expected = Event("evt_1", f"batch.{state}", "batch_1", "acme", 1700000000, "https://a.b/")
    assert event == expected


def test_openai_knows_every_type_by_its_payload() -> None:
    known: TypeAdapter[object] = TypeAdapter(UnwrapWebhookEvent)
    for event_type in EVENT_TYPES:
        body = Event("evt_1", event_type, "x_1", "default", 1700000000).body
        parsed = known.validate_python(json.loads(body), strict=False)
        assert type(parsed).__name__.lower() == event_type.replace(".", "") + "webhookevent"


def test_a_payload_is_thin() -> None:
    body = Event("evt_1", "response.completed", "job_1", "acme", 5, "https://a.b/secret").body
    assert json.loads(body) == {
        "id": "evt_1",
        "object": "event",
        "created_at": 5,
        "type": "response.completed",
        "data": {"id": "job_1"},
    }


def test_a_payload_tells_the_metadata_that_a_job_came_with() -> None:
    told = entry(j=JOB, s="done", r="stop", tn="a", t="1", m='{"of":"t\u00e9st"}')
    event = read_entry(told)
    assert event is not None
    assert json.loads(event.body)["data"] == {"id": JOB, "metadata": {"of": "t\u00e9st"}}
    known: TypeAdapter[object] = TypeAdapter(UnwrapWebhookEvent)
    assert known.validate_python(json.loads(event.body), strict=False)
    for damaged in ("{", "[]"):
        event = read_entry(entry(j=JOB, s="done", r="stop", tn="a", t="1", m=damaged))
        assert event is not None and json.loads(event.body)["data"] == {"id": JOB}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"j": JOB, "s": "done"},
        {"j": JOB, "s": "run", "tn": "a", "t": "1"},
        {"j": JOB, "s": "done", "tn": "a", "t": "soon"},
        {"b": "batch_1", "s": "in_progress", "tn": "a", "t": "1"},
        {"x": "we_1", "tn": "a", "t": "1"},
    ],
)
def test_an_entry_that_says_nothing_is_no_event(fields: dict[str, str]) -> None:
    assert read_entry(entry(**fields)) is None


def test_a_filter_takes_names_and_families() -> None:
    assert wants((), "batch.failed")
    assert wants(("batch.*",), "batch.failed") and not wants(("batch.*",), "response.failed")
    assert wants(("batch.failed",), "batch.failed") and not wants(
        ("batch.failed",), "batch.expired"
    )
    assert all(map(is_pattern, (*EVENT_TYPES, "batch.*", "response.*")))
    assert not any(map(is_pattern, ("*", "batch", "response.done", "")))
