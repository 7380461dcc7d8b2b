"""Waiting jobs whose routing keys are made of paths in an imagined prefix tree."""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob

_numbers = count(1)

Path = Sequence[int]


def key_of(path: Path) -> bytes:
    """Return the routing key of a path: chained hashes, so equal paths up to a depth share them."""
    key, parent = b"", b""
    for label in path:
        data = parent + label.to_bytes(4)
        parent = blake2b(data, digest_size=ROUTING_HASH_BYTES).digest()
        key += parent
    return key


def make_job(
    path: Path = (),
    *,
    cost: int = 100,
    model: str = "m",
    priority: int = 0,
    attempts: int = 0,
    job_id: str = "",
) -> WaitingJob:
    """Return a job submitted after all those made before it."""
    number = next(_numbers)
    return WaitingJob(
        job_id=job_id or f"job-{number}",
        queue="p1:default",
        entry_id=f"1700000000000-{number}",
        model=model,
        key=key_of(path),
        cost=cost,
        attempts=attempts,
        priority=priority,
    )
