"""What it costs a worker to prefill a job, given what its cache holds."""

from collections.abc import Collection
from typing import NamedTuple, Protocol

from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.residency import Residency

#: No prefill is faster, so that quotients of waiting and prefill times stay finite.
_LEAST_SECONDS = 1e-6


class WorkerLoads(Protocol):
    """What the interactive lane asks about workers; raises ``KeyError`` for unknown ones."""

    def ids(self) -> Collection[str]:
        """The ids of all workers, by which the lane notices who is new."""

    def busy_seconds(self, worker_id: str, /) -> float:
        """Predicted seconds until the worker has prefilled what was sent to it."""

    def decode_load(self, worker_id: str, /) -> float:
        """How much of the worker is taken up by sequences that produce tokens."""

    def cost(self, worker_id: str, /) -> StepCost:
        """What steps of the worker cost."""

    def can_hold(self, worker_id: str, job: WaitingJob, /) -> bool:
        """Whether the job fits into the worker's cache at all."""


class Price(NamedTuple):
    """A prefill: hashes already there, tokens to compute, and the seconds that takes."""

    depth: int
    uncached: int
    seconds: float


class Pricing:
    """Prices jobs on workers by what these hold now."""

    def __init__(self, residency: Residency, loads: WorkerLoads) -> None:
        self._residency = residency
        self._loads = loads
        self._tokens_per_hash = residency.tokens_per_hash

    def price(self, job: WaitingJob, key: bytes, worker_id: str, near: int) -> Price:
        """Return the price by what the worker holds; ``near`` is a guess of that depth."""
        return self.price_at(job, worker_id, self._residency.depth(worker_id, key, near))

    def look_up(self, job: WaitingJob, key: bytes, worker_id: str, before: Price) -> Price:
        """Return the price, ``before`` itself if the worker holds as much as it did then.

        What the worker has learned of its speed in between counts with the next change.
        """
        depth = self._residency.depth(worker_id, key, before.depth)
        return before if depth == before.depth else self.price_at(job, worker_id, depth)

    def price_at(self, job: WaitingJob, worker_id: str, depth: int) -> Price:
        """Return the price if the worker held ``depth`` hashes of the job's key."""
        uncached = max(1, job.cost - depth * self._tokens_per_hash)
        seconds = self._loads.cost(worker_id).prefill_seconds(uncached, max(1, job.cost))
        return Price(depth, uncached, max(_LEAST_SECONDS, seconds))
