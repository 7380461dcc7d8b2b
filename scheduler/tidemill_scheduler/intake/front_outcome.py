"""What becomes of an entry of the front door, and what its producer is told; pure."""

import json
from dataclasses import dataclass

from tidemill.protocol import calls
from tidemill.protocol.calls import Submitted
from tidemill.protocol.errors import InvalidRequest, TidemillError
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys

_MAX_CHARS = 1000
_MAX_FIELD_CHARS = 200


@dataclass(frozen=True, slots=True)
class Delay:
    """It must wait: for room, for a rate, or for a model to appear."""

    seconds: float


#: None: the entry is gone, another leader has answered it or its producer has deleted it.
Outcome = Submitted | Delay | Exception | None


def name_of(outcome: Outcome) -> str:
    """Return what an outcome is counted as."""
    if isinstance(outcome, Submitted):
        return "submitted" if outcome.created else "repeated"
    if outcome is None:
        return "gone"
    return "delayed" if isinstance(outcome, Delay) else "refused"


def answer_of(keys: ShardKeys, entry_id: str, outcome: Outcome, body: bytes) -> Call[bool] | None:
    """Return the answer to an entry with this body, None if it must wait or is gone."""
    if outcome is None or isinstance(outcome, Delay):
        return None
    if isinstance(outcome, Submitted):
        accepted = json.dumps(_accepted(outcome)).encode()
        return calls.answer(keys, entry_id=entry_id, reply=accepted)
    told = _describe(outcome)
    reply = json.dumps({"error": told}).encode()
    return calls.answer(keys, entry_id=entry_id, reply=reply, refusal=told["message"], body=body)


def _accepted(submitted: Submitted) -> dict[str, str | int]:
    told: dict[str, str | int] = {"job": submitted.job_id}
    return told if submitted.wait_ms is None else told | {"wait_ms": submitted.wait_ms}


def _describe(error: Exception) -> dict[str, str]:
    if not isinstance(error, TidemillError):
        return {"type": "BrokerError", "message": str(error)[:_MAX_CHARS]}
    told = {"type": type(error).__name__, "message": error.message[:_MAX_CHARS]}
    if isinstance(error, InvalidRequest):
        told["field"] = error.field[:_MAX_FIELD_CHARS]
    return told | ({"fix": error.fix} if error.fix else {})
