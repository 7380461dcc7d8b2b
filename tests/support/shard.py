"""Short ways to drive the Redis Functions from a test."""

from dataclasses import dataclass

import redis

from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.codec import decode
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.keys import CONSUMER, GROUP, ShardKeys
from tidemill.protocol.messages import GenerateRequest, JobEnd, JobResult, TokenChunk, Usage
from tidemill.protocol.sampling import SamplingParams

KEYS = ShardKeys()
QUEUE = "p1:default"
DEAD = JobEnd(state="dead", finish_reason="error", error="crashed its workers")
CANCELLED = JobEnd(state="cancelled", finish_reason="cancelled")
REQUEST = GenerateRequest(model="m", prompt_ids=(1, 2, 3), params=SamplingParams(seed=1))
NO_PAUSE = calls.RetryPause(base_ms=0)


def submit(client: redis.Redis, job_id: str | None = None, **options: object) -> str:
    """Submit a small job and return its id."""
    run(client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    job = calls.NewJob(job_id or new_job_id(), REQUEST, cost=3, **options)  # type: ignore[arg-type]
    return run(client, calls.submit(KEYS, job)).job_id


def lead(client: redis.Redis, scheduler_id: str = "sch_test") -> int:
    """Become the leader; returns the epoch."""
    return run(client, calls.lead(KEYS, scheduler_id=scheduler_id, lease_ms=60_000))


def read_pointers(client: redis.Redis, start: str = ">") -> list[tuple[str, str]]:
    """Return (job id, entry id) of the pointers that the scheduler's consumer gets."""
    reply = client.xreadgroup(GROUP, CONSUMER, {KEYS.ingress(QUEUE): start}, count=1000)
    entries = reply[0][1] if reply else []
    return [(fields[b"j"].decode(), entry.decode()) for entry, fields in entries if fields]


def ref_of(client: redis.Redis, job_id: str) -> JobRef:
    """Return what names the keys of a job."""
    return JobRef.read(job_id, client.hmget(KEYS.job(job_id), REF_FIELDS))


def entry_of(client: redis.Redis, job_id: str) -> str:
    """Return the entry id of a queued job's pointer."""
    return (client.hget(KEYS.job(job_id), "eid") or b"0-0").decode()


def dispatch(
    client: redis.Redis, job_id: str, epoch: int, worker: str = "wkr_a", lease_ms: int = 60_000
) -> calls.Dispatched:
    """Give a job to a worker."""
    return run(
        client,
        calls.dispatch(
            KEYS,
            job_id=job_id,
            queue=QUEUE,
            entry_id=entry_of(client, job_id),
            worker_id=worker,
            epoch=epoch,
            lease_ms=lease_ms,
        ),
    )


def claim(client: redis.Redis, job_id: str, fence: int, worker: str = "wkr_a") -> bool:
    """Say as the worker that the run command was read."""
    return run(client, calls.claim(KEYS, worker_id=worker, jobs=[(job_id, fence)]))[0]


def append(
    client: redis.Redis, job_id: str, fence: int, start: int, num: int, worker: str = "wkr_a"
) -> calls.Written:
    """Write ``num`` tokens from position ``start`` as the attempt ``fence``."""
    chunk = make_chunk(start, num)
    chunks = [(job_id, fence, chunk)]
    return run(client, calls.append(KEYS, worker_id=worker, chunks=chunks))[0]


def finish(
    client: redis.Redis,
    job_id: str,
    fence: int,
    start: int,
    num: int = 0,
    worker: str = "wkr_a",
) -> calls.Written:
    """End a job as its worker."""
    ids = tuple(range(start + num))
    end = JobEnd(state="done", finish_reason="stop", usage=Usage(completion_tokens=len(ids)))
    return run(
        client,
        calls.finish(
            KEYS,
            ref_of(client, job_id),
            fence=fence,
            worker_id=worker,
            chunk=make_chunk(start, num),
            result=JobResult(end=end, ids=ids, text="x" * len(ids), entries=((len(ids), 0),)),
        ),
    )


def cancel(client: redis.Redis, job_id: str, worker: str = "") -> tuple[int, str]:
    """End a job as its owner."""
    return run(
        client,
        calls.cancel(KEYS, ref_of(client, job_id), worker_id=worker, end=CANCELLED),
    )


def reap(client: redis.Redis, job_id: str) -> int:
    """Take a job from a worker whose lease ran out."""
    return run(client, calls.reap(KEYS, ref_of(client, job_id), end=DEAD))


def nack(
    client: redis.Redis,
    job_id: str,
    fence: int,
    worker: str = "wkr_a",
    error: str = "it hiccuped",
    pause: calls.RetryPause = NO_PAUSE,
) -> calls.NackOutcome:
    """Give a job back as its worker after an error that may pass."""
    ref = ref_of(client, job_id)
    return run(
        client,
        calls.nack(KEYS, ref, fence=fence, worker_id=worker, error=error, pause=pause),
    )


def promote(client: redis.Redis, job_id: str) -> bool:
    """Let a delayed job run if its time has come."""
    return run(client, calls.promote(KEYS, job_id=job_id, queue=QUEUE))


def expire(client: redis.Redis, job_id: str, worker: str = "") -> str:
    """End a job if a time limit of it has passed."""
    return run(client, calls.expire(KEYS, ref_of(client, job_id), worker_id=worker))


def release(client: redis.Redis, job_id: str, fence: int, worker: str = "wkr_a") -> bool:
    """Give a job back as a worker that drains."""
    return run(
        client,
        calls.release(KEYS, job_id=job_id, fence=fence, worker_id=worker, queue=QUEUE),
    )


def server_ms(client: redis.Redis) -> int:
    """The server's time."""
    seconds, microseconds = client.time()
    return seconds * 1000 + microseconds // 1000


def expire_lease(client: redis.Redis, job_id: str) -> None:
    """Make a job's lease look expired."""
    client.zadd(KEYS.running, {job_id: 1}, xx=True)


def make_chunk(start: int, num: int) -> TokenChunk:
    """Tokens whose ids are their positions."""
    return TokenChunk(start=start, end=start + num, ids=tuple(range(start, start + num)))


@dataclass(frozen=True)
class LogView:
    """A token log as a reader sees it."""

    ids: list[int]
    terminals: list[str]
    writers: list[int]


def read_log(client: redis.Redis, job_id: str) -> LogView:
    """Read a whole token log, checking that chunks follow each other without gap or overlap."""
    ids: list[int] = []
    terminals: list[str] = []
    writers: list[int] = []
    for entry, fields in client.xrange(KEYS.token_log(job_id)):
        if b"d" in fields:
            chunk = decode(fields[b"d"], TokenChunk)
            assert chunk.start == len(ids), f"gap or overlap at {entry!r}"
            ids += chunk.ids
            writers.append(int(entry.decode().partition("-")[0]))
        if b"e" in fields:
            terminals.append(decode(fields[b"e"], JobEnd).state)
    return LogView(ids, terminals, writers)
