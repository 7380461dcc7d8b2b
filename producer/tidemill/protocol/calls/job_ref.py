"""What a function needs to know of a job to name the keys that its end touches."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.protocol.keys import ShardKeys

#: Fields of a job's hash that ``JobRef.read`` takes, in its order.
REF_FIELDS = ("qn", "ik", "bid")

#: A job whose hash is gone has no queue; the functions then only take it off their indexes.
_NO_QUEUE = "p1:default"


@dataclass(frozen=True, slots=True)
class JobRef:
    """A job with what never changes about it: ingress queue, idempotency key and batch."""

    job_id: str
    queue: str
    idempotency_key: str = ""
    batch: str = ""

    @property
    def tenant(self) -> str:
        """Whose job it is."""
        return self.queue.partition(":")[2]

    @classmethod
    def read(cls, job_id: str, values: Sequence[bytes | None]) -> "JobRef":
        """Return the reference that the values of ``REF_FIELDS`` make."""
        queue, key, batch = ((value or b"").decode("utf-8", "replace") for value in values)
        return cls(job_id, queue or _NO_QUEUE, key, batch)


def ending_keys(keys: ShardKeys, ref: JobRef) -> tuple[str, ...]:
    """Return the first keys of every function that can end a job, in the library's order."""
    return (
        keys.job(ref.job_id),
        keys.token_log(ref.job_id),
        keys.running,
        keys.delayed,
        keys.due,
        keys.counters,
        keys.idempotency(ref.tenant, ref.idempotency_key),
        keys.ended,
        keys.dead_letters,
        keys.batch(ref.tenant, ref.batch),
        keys.batch_members(ref.tenant, ref.batch),
        keys.settings,
        keys.back_door(ref.tenant),
        keys.measures,
        keys.outbox,
        keys.hooks(ref.tenant),
    )
