"""One builder per Redis Function: typed arguments in, a ``Call`` out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.codec import WIRE_VERSION, encode
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import (
    GenerateRequest,
    JobEnd,
    JobResult,
    ModelCard,
    TokenChunk,
    WorkerInfo,
    WorkerStatus,
)

#: How long things live, in ms.
LOG_TTL_MS = 15 * 60 * 1000
JOB_TTL_MS = 24 * 3600 * 1000
MODEL_TTL_MS = 24 * 3600 * 1000

DEFAULT_MAX_QUEUED = 1_000_000
MAX_CRASHES = 3


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job about to be submitted; ``routing_key`` is empty if the prompt was not tokenised."""

    job_id: str
    request: GenerateRequest
    routing_key: bytes = b""
    cost: int = 0
    idempotency_key: str = ""
    body_digest: str = "-"
    max_queued: int = DEFAULT_MAX_QUEUED


@dataclass(frozen=True, slots=True)
class Submitted:
    """Reply of submit: ``created`` is false when the same job was accepted before."""

    created: bool
    job_id: str


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Reply of dispatch: ``fence`` is 0 if the job was not queued any more.

    ``command_id`` is the entry id of the run command; ``state`` and ``worker_id`` tell where a job
    that was not queued is now.
    """

    fence: int
    command_id: str
    state: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Written:
    """Reply to one append or finish: accepted, refused for good, or at another position.

    ``num_tokens`` is set when the log holds another number of tokens than the caller thought:
    its earlier write whose reply was lost, or a tail that a failover dropped.
    """

    accepted: bool
    owned: bool
    num_tokens: int | None = None
    state: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """Reply of beat: register again if not ``registered``; drop the ``lost`` jobs."""

    registered: bool
    lost: tuple[str, ...]


def queue_class(priority: int) -> str:
    """Return the priority class: p0 interactive (< 0), p1 standard (0), p2 batch (> 0)."""
    return "p0" if priority < 0 else "p1" if priority == 0 else "p2"


def queue_name(request: GenerateRequest) -> str:
    """Return the ingress queue of a request: ``<priority class>:<tenant>``."""
    return f"{queue_class(request.priority)}:{request.tenant}"


def submit(keys: ShardKeys, job: NewJob) -> Call[Submitted]:
    """Accept a job; raises ``IdempotencyConflict`` or ``QueueFull``; needs the tenant's salt."""
    request, queue = job.request, queue_name(job.request)
    return Call(
        "submit",
        (
            keys.job(job.job_id),
            keys.ingress(queue),
            keys.active_queues,
            keys.idempotency(request.tenant, job.idempotency_key),
            keys.counters,
            keys.salts,
        ),
        (
            job.job_id,
            request.tenant,
            queue,
            request.model,
            request.priority,
            encode(request),
            job.routing_key,
            job.cost,
            job.body_digest,
            job.max_queued,
            job.idempotency_key,
            keys.bell,
            WIRE_VERSION,
        ),
        lambda reply: Submitted(bool(reply[0]), _text(reply[1])),
    )


def dispatch(
    keys: ShardKeys,
    *,
    job_id: str,
    queue: str,
    entry_id: str,
    worker_id: str,
    epoch: int,
    lease_ms: int,
) -> Call[Dispatched]:
    """Give a queued job to a worker under a lease; raises ``StaleEpoch``."""
    return Call(
        "dispatch",
        (
            keys.job(job_id),
            keys.ingress(queue),
            keys.token_log(job_id),
            keys.running,
            keys.commands(worker_id),
            keys.epoch,
            keys.counters,
        ),
        (job_id, entry_id, worker_id, lease_ms, epoch, LOG_TTL_MS),
        _dispatched,
    )


def _dispatched(reply: Any) -> Dispatched:
    if reply[0]:
        return Dispatched(int(reply[1]), _text(reply[2]), "run", "")
    return Dispatched(0, "", _text(reply[1]), _text(reply[2]))


def claim(keys: ShardKeys, *, worker_id: str, jobs: Sequence[tuple[str, int]]) -> Call[list[bool]]:
    """Say that a worker has read the run commands of (job id, fence) pairs, 256 at most.

    Until then an attempt whose lease runs out does not count as a crash.  False for each attempt
    that is not this worker's any more.
    """
    return Call(
        "claim",
        tuple(keys.job(job_id) for job_id, _ in jobs),
        (worker_id, *(fence for _, fence in jobs)),
        lambda reply: [bool(code) for code in reply],
    )


def append(keys: ShardKeys, chunks: Sequence[tuple[str, int, TokenChunk]]) -> Call[list[Written]]:
    """Write the new tokens of many jobs, given as (job id, fence, chunk), in one round trip."""
    names: list[str] = []
    args: list[str | bytes | int] = []
    for job_id, fence, chunk in chunks:
        names += [keys.job(job_id), keys.token_log(job_id)]
        args += [fence, chunk.start, chunk.end, encode(chunk), keys.token_channel(job_id)]
    return Call(
        "append", tuple(names), tuple(args), lambda reply: [_written(int(code)) for code in reply]
    )


def finish(
    keys: ShardKeys,
    *,
    job_id: str,
    fence: int,
    chunk: TokenChunk,
    result: JobResult,
    tenant: str,
    idempotency_key: str = "",
) -> Call[Written]:
    """End a job as its worker: the last tokens, the result and the terminal state in one step.

    ``chunk`` may hold no ids: then its text, if any, is what a stop string had held back.
    """
    last = encode(chunk) if chunk.ids or chunk.text else b""
    return Call(
        "finish",
        (
            keys.job(job_id),
            keys.token_log(job_id),
            keys.running,
            keys.counters,
            keys.idempotency(tenant, idempotency_key),
        ),
        (
            job_id,
            fence,
            result.end.state,
            chunk.start,
            chunk.end,
            last,
            encode(result.end),
            encode(result),
            keys.token_channel(job_id),
            LOG_TTL_MS,
            JOB_TTL_MS,
        ),
        lambda reply: _written(int(reply[0]), _text(reply[1])),
    )


def cancel(
    keys: ShardKeys,
    *,
    job_id: str,
    queue: str,
    worker_id: str,
    end: JobEnd,
    idempotency_key: str = "",
) -> Call[tuple[int, str]]:
    """End a job without its worker: as cancelled by its owner, or as failed by the scheduler.

    Replies (1, state) ended now, (0, state) was terminal, (-1, "gone") no such job, or
    (-2, worker id) it runs on another worker than ``worker_id``: call again with that one.
    """
    tenant = queue.partition(":")[2]
    return Call(
        "cancel",
        (
            keys.job(job_id),
            keys.token_log(job_id),
            keys.running,
            keys.counters,
            keys.idempotency(tenant, idempotency_key),
            keys.ingress(queue),
            keys.commands(worker_id or "none"),
        ),
        (
            job_id,
            worker_id,
            end.state,
            encode(end),
            keys.token_channel(job_id),
            JOB_TTL_MS,
            LOG_TTL_MS,
        ),
        lambda reply: (int(reply[0]), _text(reply[1])),
    )


def release(keys: ShardKeys, *, job_id: str, fence: int, queue: str) -> Call[bool]:
    """Give a running job back to the queue; false if it is no longer the caller's."""
    return Call(
        "release",
        (
            keys.job(job_id),
            keys.ingress(queue),
            keys.active_queues,
            keys.running,
            keys.counters,
        ),
        (job_id, fence, queue, keys.bell),
        bool,
    )


def beat(
    keys: ShardKeys,
    *,
    worker_id: str,
    model: str,
    tokenizer_digest: str,
    lease_ms: int,
    jobs: Sequence[tuple[str, int]],
) -> Call[Beat]:
    """Renew a worker's registration and the leases of its (job id, fence) pairs, 256 at most."""
    ownership = [part for pair in jobs for part in pair]
    return Call(
        "beat",
        (
            keys.running,
            keys.workers,
            keys.worker_info(worker_id),
            keys.commands(worker_id),
            keys.status(worker_id),
            keys.model(model),
            keys.models,
            keys.tokenizer(tokenizer_digest),
            *(keys.job(job_id) for job_id, _ in jobs),
        ),
        (worker_id, lease_ms, LOG_TTL_MS, MODEL_TTL_MS, model, *ownership),
        lambda reply: Beat(bool(reply[0]), tuple(_text(job_id) for job_id in reply[1:])),
    )


def reap(
    keys: ShardKeys,
    *,
    job_id: str,
    queue: str,
    end: JobEnd,
    idempotency_key: str = "",
    max_crashes: int = MAX_CRASHES,
) -> Call[int]:
    """Requeue a job whose lease ran out: 1 requeued, 2 dead after too many crashes, 0 neither."""
    tenant = queue.partition(":")[2]
    return Call(
        "reap",
        (
            keys.job(job_id),
            keys.ingress(queue),
            keys.active_queues,
            keys.running,
            keys.counters,
            keys.token_log(job_id),
            keys.idempotency(tenant, idempotency_key),
            keys.dead_letters,
        ),
        (
            job_id,
            queue,
            max_crashes,
            encode(end),
            keys.token_channel(job_id),
            JOB_TTL_MS,
            keys.bell,
        ),
        int,
    )


def report(keys: ShardKeys, *, worker_id: str, status: WorkerStatus) -> Call[int]:
    """Add an entry to a worker's status stream; goes on when the server's memory is full."""
    return Call("report", (keys.status(worker_id),), (encode(status), LOG_TTL_MS), int)


def bury(keys: ShardKeys, *, queue: str, entry_id: str, job_id: bytes, reason: str) -> Call[bool]:
    """Move a pointer that nobody can read to the dead letters; false if it is gone already."""
    return Call(
        "bury",
        (keys.ingress(queue), keys.dead_letters),
        (entry_id, queue, job_id, reason),
        bool,
    )


def retire(keys: ShardKeys, queue: str) -> Call[bool]:
    """Forget an ingress queue if it is empty."""
    return Call("retire", (keys.ingress(queue), keys.active_queues), (queue,), bool)


def lead(keys: ShardKeys, *, scheduler_id: str, lease_ms: int) -> Call[int]:
    """Take or renew the leader's lease; returns the epoch, or 0 if another scheduler leads."""
    return Call("lead", (keys.leader, keys.epoch), (scheduler_id, lease_ms), int)


def resign(keys: ShardKeys, *, scheduler_id: str) -> Call[int]:
    """Give up the leader's lease if it is ours."""
    return Call("lead", (keys.leader, keys.epoch), (scheduler_id, 0), int)


def salt(keys: ShardKeys, *, tenant: str, random: bytes) -> Call[bytes]:
    """Return the tenant's salt, made of ``random`` if it has none yet."""
    return Call("salt", (keys.salts,), (tenant, random), bytes)


def register(
    keys: ShardKeys, *, info: WorkerInfo, card: ModelCard, tokenizer: bytes, lease_ms: int
) -> Call[int]:
    """Announce a worker, the model it serves and the tokenizer producers need for it."""
    return Call(
        "register",
        (
            keys.workers,
            keys.worker_info(info.worker_id),
            keys.model(card.name),
            keys.models,
            keys.tokenizer(card.tokenizer_digest),
        ),
        (
            info.worker_id,
            lease_ms,
            LOG_TTL_MS,
            MODEL_TTL_MS,
            card.name,
            encode(info),
            encode(card),
            tokenizer,
        ),
        int,
    )


#: Reply code of an append that failed inside the server for a reason of its own.
_APPEND_ERROR = -1_000_000_001


def _written(code: int, state: str = "") -> Written:
    if code == 1:
        return Written(accepted=True, owned=True, state=state)
    if code in (0, -1):
        return Written(accepted=False, owned=False, state=state)
    position = None if code == _APPEND_ERROR else -2 - code
    return Written(accepted=False, owned=True, num_tokens=position, state=state)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
