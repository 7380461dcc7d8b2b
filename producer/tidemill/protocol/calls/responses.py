"""Calls about the records of responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.calls.replies import text
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys


@dataclass(frozen=True, slots=True)
class Kept:
    """Reply of put_response: ``known`` is the record that was there before, if any.

    Where there is no room ``lacking`` says whose bound is reached, "tenant" or "all"; ``used`` and
    ``limit`` are bytes.
    """

    known: bytes = b""
    lacking: str = ""
    used: int = 0
    limit: int = 0


def put_response(
    keys: ShardKeys, tenant: str, job_id: str, record: bytes, *, ttl_ms: int
) -> Call[Kept]:
    """Keep the record of a response, unless its job has one or there is no room."""
    return Call(
        "put_response",
        (
            keys.response(tenant, job_id),
            keys.responses_until,
            keys.response_bytes,
            keys.settings,
            keys.measures,
        ),
        (tenant, job_id, record, ttl_ms),
        _kept,
    )


def end_response(keys: ShardKeys, tenant: str, job_id: str, *, ttl_ms: int) -> Call[bool]:
    """Let a record go earlier; false if there is none, or it goes before."""
    return Call(
        "end_response",
        (keys.response(tenant, job_id), keys.responses_until),
        (tenant, job_id, ttl_ms),
        bool,
    )


def drop_response(keys: ShardKeys, tenant: str, job_id: str) -> Call[bool]:
    """Forget a record now; false if there is none."""
    return Call(
        "drop_response",
        (keys.response(tenant, job_id), keys.responses_until, keys.response_bytes),
        (tenant, job_id),
        bool,
    )


def _kept(reply: Sequence[Any]) -> Kept:
    if reply[0]:
        return Kept(known=bytes(reply[1]))
    return Kept(lacking=text(reply[1]), used=int(reply[2]), limit=int(reply[3]))
