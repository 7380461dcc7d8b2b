"""Calls that can end a job."""

from dataclasses import dataclass
from enum import IntEnum

from tidemill.protocol.calls.job_ref import JobRef, ending_keys
from tidemill.protocol.calls.lifetimes import (
    BACK_DOOR_TTL_MS,
    DEAD_TTL_MS,
    JOB_TTL_MS,
    LOG_TTL_MS,
)
from tidemill.protocol.calls.replies import Written, text, written
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import JobEnd, JobResult, TokenChunk
from tidemill.protocol.states import FinishReason, JobState

MAX_CRASHES = 3

#: Of an error that is stored with its job.
MAX_ERROR_CHARS = 1000


@dataclass(frozen=True, slots=True)
class RetryPause:
    """Exponential backoff: ``base_ms`` doubled with each retry up to ``cap_ms``, times ``jitter``.

    ``jitter`` is drawn by the caller, between 0 and 1, so that the function stays deterministic.
    """

    base_ms: int = 1_000
    cap_ms: int = 60_000
    jitter: float = 1.0


class NackOutcome(IntEnum):
    """What became of a job that its worker gave back after an error."""

    NOT_OURS = 0
    DELAYED = 1
    DEAD = 2
    EXPIRED = 3


def time_limit_end(reason: FinishReason) -> JobEnd:
    """Return how a job ends whose time limit of this name has passed."""
    return JobEnd(state=JobState.EXPIRED, finish_reason=reason, error=_LIMITS[reason])


_LIMITS = {
    FinishReason.DEADLINE: "the job's deadline passed before it was done",
    FinishReason.QUEUE_TIMEOUT: "the job waited in the queue for longer than its max_queue allows",
    FinishReason.STALLED: "the job produced no token for longer than its stall timeout",
}


def finish(
    keys: ShardKeys,
    ref: JobRef,
    *,
    fence: int,
    worker_id: str,
    chunk: TokenChunk,
    result: JobResult,
) -> Call[Written]:
    """End a job as its worker: the last tokens, the result and the terminal state in one step.

    ``chunk`` may hold no ids: then its text, if any, is what a stop string had held back.
    """
    last = encode(chunk) if chunk.ids or chunk.text else b""
    return Call(
        "finish",
        ending_keys(keys, ref),
        (
            ref.job_id,
            fence,
            worker_id,
            result.end.state,
            result.end.finish_reason or "",
            chunk.start,
            chunk.end,
            last,
            encode(result.end),
            encode(result),
            keys.token_channel(ref.job_id),
            LOG_TTL_MS,
            JOB_TTL_MS,
            BACK_DOOR_TTL_MS,
        ),
        lambda reply: written(int(reply[0]), text(reply[1])),
    )


def cancel(keys: ShardKeys, ref: JobRef, *, worker_id: str, end: JobEnd) -> Call[tuple[int, str]]:
    """End a job as its owner, without its worker.

    Replies (1, state) ended now, (0, state) was terminal, (-1, "gone") no such job, or
    (-2, worker id) it runs on another worker than ``worker_id``: call again with that one.
    """
    return Call(
        "cancel",
        (*ending_keys(keys, ref), *_places(keys, ref, worker_id)),
        _cancel_args(keys, ref, worker_id, end),
        lambda reply: (int(reply[0]), text(reply[1])),
    )


def refuse(keys: ShardKeys, ref: JobRef, *, epoch: int, end: JobEnd) -> Call[tuple[int, str]]:
    """End a waiting job as the scheduler: it can never run.

    Replies as ``cancel``, (-2, worker id) if it runs after all.  Raises ``StaleEpoch``.
    """
    return Call(
        "refuse",
        (*ending_keys(keys, ref), *_places(keys, ref, ""), keys.epoch),
        (*_cancel_args(keys, ref, "", end), epoch),
        lambda reply: (int(reply[0]), text(reply[1])),
    )


def _cancel_args(
    keys: ShardKeys, ref: JobRef, worker_id: str, end: JobEnd
) -> tuple[str | bytes | int, ...]:
    return (
        ref.job_id,
        worker_id,
        end.state,
        end.finish_reason or "",
        encode(end),
        keys.token_channel(ref.job_id),
        JOB_TTL_MS,
        BACK_DOOR_TTL_MS,
        LOG_TTL_MS,
    )


def expire(keys: ShardKeys, ref: JobRef, *, worker_id: str) -> Call[str]:
    """End a job whose time is over, or note when to look at it again.

    Replies the finish reason, "" if no limit has passed, or "moved" if it runs on another worker
    than ``worker_id``: look where it is and call again.
    """
    endings = (
        encode(time_limit_end(reason))
        for reason in (FinishReason.DEADLINE, FinishReason.QUEUE_TIMEOUT, FinishReason.STALLED)
    )
    return Call(
        "expire",
        (*ending_keys(keys, ref), *_places(keys, ref, worker_id)),
        (
            ref.job_id,
            worker_id,
            *endings,
            keys.token_channel(ref.job_id),
            JOB_TTL_MS,
            BACK_DOOR_TTL_MS,
            LOG_TTL_MS,
        ),
        text,
    )


def nack(
    keys: ShardKeys, ref: JobRef, *, fence: int, worker_id: str, error: str, pause: RetryPause
) -> Call[NackOutcome]:
    """Give a job back after an error that may pass: delayed, or dead without retries left.

    A job whose next try would come after its deadline expires at once.
    """
    told = error[:MAX_ERROR_CHARS]
    dead = JobEnd(state=JobState.DEAD, finish_reason=FinishReason.ERROR, error=told)
    return Call(
        "nack",
        ending_keys(keys, ref),
        (
            ref.job_id,
            fence,
            worker_id,
            told,
            pause.base_ms,
            pause.cap_ms,
            f"{pause.jitter:.6f}",
            encode(dead),
            encode(time_limit_end(FinishReason.DEADLINE)),
            keys.token_channel(ref.job_id),
            JOB_TTL_MS,
            DEAD_TTL_MS,
            BACK_DOOR_TTL_MS,
        ),
        lambda reply: NackOutcome(int(reply[0])),
    )


def reap(keys: ShardKeys, ref: JobRef, *, end: JobEnd, max_crashes: int = MAX_CRASHES) -> Call[int]:
    """Requeue a job whose lease ran out: 1 requeued, 2 dead after too many crashes, 0 neither."""
    return Call(
        "reap",
        (*ending_keys(keys, ref), keys.ingress(ref.queue), keys.active_queues),
        (
            ref.job_id,
            ref.queue,
            max_crashes,
            encode(end),
            keys.token_channel(ref.job_id),
            DEAD_TTL_MS,
            BACK_DOOR_TTL_MS,
            keys.bell,
        ),
        int,
    )


def _places(keys: ShardKeys, ref: JobRef, worker_id: str) -> tuple[str, str]:
    return (keys.ingress(ref.queue), keys.commands(worker_id or "none"))
