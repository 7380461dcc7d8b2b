"""What is told of ended work: OpenAI's event names and its thin payload."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.protocol.states import FinishReason, JobState

#: Sent to one endpoint on demand; it needs no filter.
TEST_EVENT = "tidemill.test"

_BATCH_STATES = ("completed", "failed", "expired", "cancelled")
_JOB_STATES = ("completed", "failed", "cancelled", "incomplete")
EVENT_TYPES = (
    *(f"response.{state}" for state in _JOB_STATES),
    *(f"batch.{state}" for state in _BATCH_STATES),
)

_ENDS = {
    JobState.DONE: "completed",
    JobState.FAILED: "failed",
    JobState.DEAD: "failed",
    JobState.EXPIRED: "failed",
    JobState.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One end of something; its id is the same however often it is told.

    ``about`` is the id of the job or batch.  ``callback_url`` came with the work, "" if none did,
    and so did ``metadata``; ``only_endpoint`` is the endpoint that a test is for.  ``is_line``
    tells that endpoints are told of a batch in place of this job, a line of it.
    """

    event_id: str
    event_type: str
    about: str
    tenant: str
    created: int
    callback_url: str = ""
    only_endpoint: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    is_line: bool = False

    @property
    def body(self) -> bytes:
        """The payload: what happened to which thing, and what its owner knows it by."""
        data: dict[str, Any] = {"id": self.about}
        if self.metadata:
            data["metadata"] = self.metadata
        payload = {
            "id": self.event_id,
            "object": "event",
            "created_at": self.created,
            "type": self.event_type,
            "data": data,
        }
        return json.dumps(payload, separators=(",", ":")).encode()


def wants(patterns: tuple[str, ...], event_type: str) -> bool:
    """Whether an endpoint with this filter wants an event: no filter, its name, ``<family>.*``."""
    family = event_type.partition(".")[0]
    return not patterns or event_type in patterns or f"{family}.*" in patterns


def is_pattern(text: str) -> bool:
    """Whether ``text`` may stand in an endpoint's filter."""
    return text in EVENT_TYPES or text in ("response.*", "batch.*")


def read_entry(fields: Mapping[bytes, bytes]) -> Event | None:
    """Return the event that an entry of the outbox stands for; None if it stands for none."""
    text = {name.decode(): value.decode("utf-8", "replace") for name, value in fields.items()}
    tenant, when = text.get("tn", ""), text.get("t", "")
    if not tenant or not when.isdecimal():
        return None
    created, url, state = int(when) // 1000, text.get("u", ""), text.get("s", "")
    if job := text.get("j"):
        kind, about = _job_event(state, text.get("r", "")), job
    elif batch := text.get("b"):
        kind, about = f"batch.{state}" if state in _BATCH_STATES else "", batch
    elif (endpoint := text.get("x")) and (event_id := text.get("i")):
        return Event(event_id, TEST_EVENT, endpoint, tenant, created, only_endpoint=endpoint)
    else:
        return None
    if not kind:
        return None
    return Event(
        _event_id(about),
        kind,
        about,
        tenant,
        created,
        url,
        metadata=_metadata(text.get("m", "")),
        is_line="l" in text,
    )


def _metadata(stored: str) -> dict[str, str]:
    try:
        found = json.loads(stored or "{}")
    except ValueError:
        return {}  # the end is told whatever else the entry holds
    return found if isinstance(found, dict) else {}


def _job_event(state: str, reason: str) -> str:
    if state not in set(_ENDS):
        return ""
    if state == JobState.DONE and reason == FinishReason.LENGTH:
        return "response.incomplete"
    return f"response.{_ENDS[JobState(state)]}"


def _event_id(about: str) -> str:
    # Work ends once, so its id makes one for its end that needs no memory.
    return f"evt_{about.partition('_')[2] or about}"
