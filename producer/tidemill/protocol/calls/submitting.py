"""Calls by which jobs come in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.calls.lifetimes import REPLY_TTL_MS
from tidemill.protocol.calls.replies import text
from tidemill.protocol.codec import WIRE_VERSION, encode
from tidemill.protocol.functions import Call, Field
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import GenerateRequest, JobTerms
from tidemill.protocol.requests import Request

#: Bound on a tenant's waiting jobs where no setting says otherwise.
DEFAULT_MAX_QUEUED = 1_000_000

NO_TERMS = JobTerms()

#: Reply of admit where the entry is gone.
_ANSWERED = -1


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job about to be submitted; ``routing_key`` is empty if the prompt was not tokenised.

    ``cost`` are its prompt's tokens, 0 if unknown; ``num_tokens`` what it counts against the
    tenant's quotas, prompt and longest output together.  ``max_output`` bounds its output tokens, 0
    if it has no bound of its own; ``hint_depth`` (0 or 1) tells how many hashes at the start of the
    routing key stand for a prefix id and not for tokens.
    """

    job_id: str
    request: Request
    routing_key: bytes = b""
    cost: int = 0
    num_tokens: int = 0
    idempotency_key: str = ""
    body_digest: str = "-"
    max_queued: int = DEFAULT_MAX_QUEUED
    terms: JobTerms = NO_TERMS
    parent: str = ""
    max_output: int = 0
    hint_depth: int = 0


@dataclass(frozen=True, slots=True)
class Submitted:
    """Reply of submit: ``created`` is false when the same job was accepted before.

    ``durability`` is the level of the server with ``run_id`` as the leader has seen it, both empty
    before there was a leader.  ``wait_ms`` is how long the job is likely to wait for a worker, its
    delay included, None if that is unknown or the job is not new.
    """

    created: bool
    job_id: str
    durability: str = ""
    run_id: str = ""
    wait_ms: int | None = None


def is_at_risk(terms: JobTerms, wait_ms: int | None) -> bool:
    """Whether a job that is likely to wait so long will do so beyond its deadline."""
    return wait_ms is not None and 0 < terms.deadline_ms < wait_ms


def queue_class(priority: int) -> str:
    """Return the priority class: p0 interactive (< 0), p1 standard (0), p2 batch (> 0)."""
    return "p0" if priority < 0 else "p1" if priority == 0 else "p2"


def queue_name(request: Request) -> str:
    """Return the ingress queue of a request: ``<priority class>:<tenant>``."""
    return f"{queue_class(request.priority)}:{request.tenant}"


def submit(keys: ShardKeys, job: NewJob) -> Call[Submitted]:
    """Accept a job; needs the tenant's salt.

    Raises ``IdempotencyConflict``, ``BatchClosed``, ``QueueFull`` or ``RateLimited``.
    """
    return Call("submit", _submit_keys(keys, job), _submit_args(keys, job), _submitted)


def admit(keys: ShardKeys, job: NewJob, *, epoch: int, entry_id: str) -> Call[Submitted | None]:
    """Submit what an entry of the front door asks for; None if that was answered before.

    Raises what ``submit`` raises, and ``StaleEpoch``.
    """
    return Call(
        "admit",
        (*_submit_keys(keys, job), keys.epoch, keys.front_door),
        (*_submit_args(keys, job), epoch, entry_id),
        lambda reply: None if reply[0] == _ANSWERED else _submitted(reply),
    )


def _submit_keys(keys: ShardKeys, job: NewJob) -> tuple[str, ...]:
    request, terms, queue = job.request, job.terms, queue_name(job.request)
    return (
        keys.job(job.job_id),
        keys.ingress(queue),
        keys.active_queues,
        keys.idempotency(request.tenant, job.idempotency_key),
        keys.counters,
        keys.salts,
        keys.settings,
        keys.measures,
        keys.rate_buckets(request.tenant),
        keys.delayed,
        keys.due,
        keys.batch(request.tenant, terms.batch),
        keys.batch_members(request.tenant, terms.batch),
        keys.libraries,
        keys.jobs(request.tenant),
    )


def _submit_args(keys: ShardKeys, job: NewJob) -> tuple[Field, ...]:
    request, terms = job.request, job.terms
    return (
        job.job_id,
        request.tenant,
        queue_name(request),
        request.model,
        request.priority,
        encode(request),
        job.routing_key,
        job.cost,
        job.num_tokens,
        job.body_digest,
        job.max_queued,
        job.idempotency_key,
        keys.bell,
        WIRE_VERSION,
        terms.delay_ms,
        terms.not_before_ms,
        terms.deadline_ms,
        terms.max_queue_ms,
        terms.stall_ms,
        terms.max_retries,
        terms.batch,
        job.parent,
        job.max_output,
        job.hint_depth,
        terms.callback_url,
        _num_outputs(request),
        metadata_text(terms.metadata),
    )


def metadata_text(metadata: Mapping[str, str]) -> str:
    """Return metadata as it is stored: JSON, empty if there is none."""
    if not metadata:
        return ""
    return json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))


def _num_outputs(request: Request) -> int:
    """How many sequences a job becomes, 0 if it is one, as of nearly all."""
    num_outputs = request.params.num_outputs if isinstance(request, GenerateRequest) else 1
    return num_outputs if num_outputs > 1 else 0


def _submitted(reply: Sequence[Any]) -> Submitted:
    created, job_id, durability, run_id, wait_ms = reply
    return Submitted(
        bool(created),
        text(job_id),
        text(durability),
        text(run_id),
        None if wait_ms < 0 else int(wait_ms),
    )


def salt(keys: ShardKeys, *, tenant: str, random: bytes) -> Call[bytes]:
    """Return the tenant's salt, made of ``random`` if it has none yet."""
    return Call("salt", (keys.salts,), (tenant, random), bytes)


def close_batch(keys: ShardKeys, *, tenant: str, batch: str, state: str) -> Call[int]:
    """Let no more jobs into a batch, whatever becomes of those that are in it."""
    return Call("close_batch", (keys.batch(tenant, batch),), (state,), int)


def answer(
    keys: ShardKeys, *, entry_id: str, reply: bytes, refusal: str = "", body: bytes = b""
) -> Call[bool]:
    """Answer one entry of the front door and take it off; false if it was answered before.

    With ``refusal`` the entry's ``body`` becomes a dead letter.
    """
    return Call(
        "answer",
        (keys.front_door, keys.front_reply(entry_id), keys.dead_letters),
        (entry_id, reply, REPLY_TTL_MS, refusal, body),
        bool,
    )
