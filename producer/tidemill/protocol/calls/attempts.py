"""Calls about one attempt of a job: given to a worker, its tokens, given back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.calls.lifetimes import LOG_TTL_MS
from tidemill.protocol.calls.replies import Written, text, written
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import TokenChunk


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
            keys.due,
            keys.commands(worker_id),
            keys.epoch,
            keys.counters,
        ),
        (job_id, entry_id, worker_id, lease_ms, epoch, LOG_TTL_MS),
        _dispatched,
    )


def _dispatched(reply: Any) -> Dispatched:
    if reply[0]:
        return Dispatched(int(reply[1]), text(reply[2]), "run", "")
    return Dispatched(0, "", text(reply[1]), text(reply[2]))


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


def append(
    keys: ShardKeys, *, worker_id: str, chunks: Sequence[tuple[str, int, TokenChunk]]
) -> Call[list[Written]]:
    """Write the new tokens of a worker's (job id, fence, chunk) triples in one round trip."""
    names: list[str] = []
    args: list[str | bytes | int] = [worker_id]
    for job_id, fence, chunk in chunks:
        names += [keys.job(job_id), keys.token_log(job_id)]
        args += [fence, chunk.start, chunk.end, encode(chunk), keys.token_channel(job_id)]
    return Call(
        "append", tuple(names), tuple(args), lambda reply: [written(int(code)) for code in reply]
    )


def release(keys: ShardKeys, *, job_id: str, fence: int, worker_id: str, queue: str) -> Call[bool]:
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
        (job_id, fence, worker_id, queue, keys.bell),
        bool,
    )


def promote(keys: ShardKeys, *, job_id: str, queue: str) -> Call[bool]:
    """Let a delayed job run whose time has come; false if it has not, or the job is elsewhere."""
    return Call(
        "promote",
        (keys.job(job_id), keys.ingress(queue), keys.active_queues, keys.delayed),
        (job_id, queue, keys.bell),
        bool,
    )
