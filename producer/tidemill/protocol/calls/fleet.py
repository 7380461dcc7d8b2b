"""Calls about workers, schedulers and the upkeep of a shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.protocol.calls.backlog import Backlog
from tidemill.protocol.calls.job_ref import JobRef
from tidemill.protocol.calls.lifetimes import LOG_TTL_MS, MODEL_TTL_MS
from tidemill.protocol.calls.reading import Fields, written_entries
from tidemill.protocol.calls.replies import text
from tidemill.protocol.codec import MAX_MAP_LEN, encode, pack
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard, WorkerInfo, WorkerStatus

#: Prefixes in one hint: what one msgpack map may hold.
MAX_HINTS = MAX_MAP_LEN


@dataclass(frozen=True, slots=True)
class Beat:
    """Reply of beat: register again if not ``registered``; drop the ``lost`` jobs."""

    registered: bool
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measures:
    """What a leader has measured: jobs, tokens and bytes that end per second, and its server.

    Only jobs that a worker brought to their end count.  ``pace`` is how many would end per second
    if all workers were full, 0 if that is unknown.
    ``max_bytes`` bounds the requests of all jobs that have not ended, 0 for no bound;
    ``durability`` is the level of the server process ``run_id``; ``backlog`` what waits in the
    classes of priority, None if that is unknown.
    """

    jobs_per_second: float
    tokens_per_second: float
    bytes_per_second: float
    max_bytes: int
    durability: str
    run_id: str
    backlog: Backlog | None = None
    pace: float = 0.0


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
            keys.kv_snapshot(worker_id),
            keys.model(model),
            keys.models,
            keys.tokenizer(tokenizer_digest),
            keys.libraries,
            *(keys.job(job_id) for job_id, _ in jobs),
        ),
        (worker_id, lease_ms, LOG_TTL_MS, MODEL_TTL_MS, model, *ownership),
        lambda reply: Beat(bool(reply[0]), tuple(text(job_id) for job_id in reply[1:])),
    )


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
            keys.libraries,
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


def deregister(keys: ShardKeys, *, worker_id: str, cursor: str) -> Call[list[tuple[bytes, Fields]]]:
    """Take a worker out; returns the entries of its command stream after ``cursor``."""
    return Call(
        "deregister",
        (
            keys.workers,
            keys.worker_info(worker_id),
            keys.commands(worker_id),
            keys.status(worker_id),
            keys.kv_snapshot(worker_id),
        ),
        (worker_id, cursor),
        written_entries,
    )


def report(
    keys: ShardKeys,
    *,
    worker_id: str,
    status: WorkerStatus,
    events: bytes = b"",
    snapshot: bytes = b"",
) -> Call[int]:
    """Add an entry to a worker's status stream; goes on when the server's memory is full.

    ``events`` is an encoded ``KvEvents``; ``snapshot``, an encoded ``KvSnapshot`` that includes
    them, takes the place of the one before.  Empty ones are left out.
    """
    return Call(
        "report",
        (keys.status(worker_id), keys.kv_snapshot(worker_id)),
        (encode(status), LOG_TTL_MS, events, snapshot),
        int,
    )


def hint(keys: ShardKeys, *, worker_id: str, refs: Mapping[bytes, int]) -> Call[bool]:
    """Tell a worker how many waiting jobs will use a prefix: routing hash -> jobs, 0 for no more.

    At most ``MAX_HINTS`` at a time.  Losing one costs at most the prefix; false if the worker has
    never had a command.
    """
    return Call("hint", (keys.commands(worker_id),), (pack(dict(refs)), LOG_TTL_MS), bool)


def lead(keys: ShardKeys, *, scheduler_id: str, lease_ms: int) -> Call[int]:
    """Take or renew the leader's lease; returns the epoch, or 0 if another scheduler leads."""
    return Call("lead", _lead_keys(keys), (scheduler_id, lease_ms), int)


def resign(keys: ShardKeys, *, scheduler_id: str) -> Call[int]:
    """Give up the leader's lease if it is ours."""
    return Call("lead", _lead_keys(keys), (scheduler_id, 0), int)


def measure(keys: ShardKeys, measures: Measures) -> Call[int]:
    """Tell everyone what the leader has measured; submit answers from it."""
    return Call(
        "measure",
        (keys.measures,),
        (
            f"{measures.jobs_per_second:.3f}",
            f"{measures.tokens_per_second:.3f}",
            f"{measures.bytes_per_second:.3f}",
            measures.max_bytes or "",
            measures.durability,
            measures.run_id,
            "" if measures.backlog is None else measures.backlog.told(),
            f"{measures.pace:.6f}",
        ),
        int,
    )


def bury(keys: ShardKeys, *, queue: str, entry_id: str, job_id: bytes, reason: str) -> Call[bool]:
    """Move a pointer that nobody can read to the dead letters; false if it is gone already."""
    return Call(
        "bury",
        (keys.ingress(queue), keys.dead_letters),
        (entry_id, queue, job_id, reason),
        bool,
    )


def drop_letter(keys: ShardKeys, ref: JobRef, *, entry_id: str, with_job: bool) -> Call[bool]:
    """Take an entry off the dead letters, and forget its job ``with_job``; false if it was not."""
    return Call(
        "drop_letter",
        (
            keys.dead_letters,
            keys.job(ref.job_id),
            keys.token_log(ref.job_id),
            keys.ended,
            keys.counters,
            keys.idempotency(ref.tenant, ref.idempotency_key),
            keys.jobs(ref.tenant),
        ),
        (entry_id, ref.job_id, int(with_job)),
        bool,
    )


def retire(keys: ShardKeys, queue: str) -> Call[bool]:
    """Forget an ingress queue if it is empty."""
    return Call("retire", (keys.ingress(queue), keys.active_queues), (queue,), bool)


def job_of(member: str) -> str:
    """Return the id of the job that a member of the ``ended`` index names.

    A member is ``<bytes> <id> <tenant>``.
    """
    return member.partition(" ")[2].partition(" ")[0]


def tenant_of(member: str) -> str:
    """Return the tenant that a member of the ``ended`` index names; the job may be gone."""
    return member.rpartition(" ")[2]


def trim(keys: ShardKeys, members: Sequence[tuple[str, JobRef]]) -> Call[int]:
    """Forget ended jobs, members of the ``ended`` index, 128 at most; returns how many."""
    names = [keys.ended, keys.counters]
    for member, ref in members:
        names += [
            keys.job(ref.job_id),
            keys.token_log(ref.job_id),
            keys.idempotency(ref.tenant, ref.idempotency_key),
            keys.jobs(tenant_of(member)),
        ]
    return Call("trim", tuple(names), tuple(member for member, _ in members), int)


def _lead_keys(keys: ShardKeys) -> tuple[str, ...]:
    return (keys.leader, keys.epoch, keys.libraries)
