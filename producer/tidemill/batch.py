"""Groups of jobs: how far they are, and what cancelling one came to."""

from dataclasses import dataclass

from tidemill._reads import Read
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.stored import require_number


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """How many jobs of a batch were submitted and how they ended; all 0 if there is no such batch.

    ``is_closed`` tells that it was cancelled and takes no more jobs.
    """

    name: str
    total: int
    done: int
    failed: int
    cancelled: int
    expired: int
    dead: int
    is_closed: bool

    @property
    def unfinished(self) -> int:
        """Jobs that have not ended."""
        return self.total - self.done - self.failed - self.cancelled - self.expired - self.dead


@dataclass(frozen=True, slots=True)
class CancelCounts:
    """How many jobs were cancelled, and how many ended by themselves while that went on."""

    cancelled: int
    ended: int


def batch_status(keys: ShardKeys, tenant: str, name: str) -> Read[BatchStatus]:
    """Read the counts of a batch; raises ``MalformedMessage`` if one is no number."""
    return Read(
        (("HGETALL", keys.batch(tenant, name)),),
        lambda replies: _batch_status(keys.batch(tenant, name), name, replies[0]),
    )


def _batch_status(key: str, name: str, fields: dict[bytes, bytes]) -> BatchStatus:
    def count(field: bytes) -> int:
        return require_number(f"{key}: {field.decode()}", fields.get(field))

    return BatchStatus(
        name=name,
        total=count(b"total"),
        done=count(b"done"),
        failed=count(b"failed"),
        cancelled=count(b"cancelled"),
        expired=count(b"expired"),
        dead=count(b"dead"),
        is_closed=b"st" in fields,
    )
