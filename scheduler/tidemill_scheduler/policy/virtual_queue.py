"""The jobs that wait for one worker, by tenant."""

from collections.abc import Callable, Iterator, KeysView
from itertools import chain, islice

from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.tenant_queue import EXACT_SIZE, TenantQueue


class VirtualQueue:
    """One worker's queue, which is in the daemon's memory alone, so that any job can still move."""

    def __init__(self, worker_id: str, reprice: Callable[[BoundJob], None]) -> None:
        self._worker_id = worker_id
        self._reprice = reprice
        self._tenants: dict[str, TenantQueue] = {}
        self._seconds = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BoundJob]:
        return chain.from_iterable(queue.jobs for queue in self._tenants.values())

    @property
    def seconds(self) -> float:
        """Seconds of prefill that were planned for the jobs here."""
        return self._seconds if self._count else 0.0

    @property
    def tenants(self) -> KeysView[str]:
        """Who has jobs here."""
        return self._tenants.keys()

    def add(self, bound: BoundJob) -> None:
        """Bind a job, which has its price on this worker and a plan."""
        bound.worker_id = self._worker_id
        tenant = bound.job.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = TenantQueue(self._reprice)
        queue.add(bound)
        self._seconds += bound.planned.seconds
        self._count += 1

    def remove(self, bound: BoundJob) -> None:
        """Unbind a job that leaves without being its worker's pick; raises ``KeyError``."""
        self._tenants[bound.job.tenant].remove(bound)
        self._left(bound)

    def take(self, bound: BoundJob) -> None:
        """Unbind a job that is sent; raises ``KeyError``."""
        self._tenants[bound.job.tenant].take(bound)
        self._left(bound)

    def place(self, bound: BoundJob) -> None:
        """Put a job that is bound here where its new price belongs."""
        self._tenants[bound.job.tenant].place(bound)

    def pick(self, tenant: str, now: float, busy_seconds: float) -> BoundJob | None:
        """Return a tenant's next job; ``busy_seconds`` of work are at the worker already."""
        queue = self._tenants.get(tenant)
        return None if queue is None else queue.pick(now, busy_seconds + self.seconds)

    def is_exact(self, tenant: str) -> bool:
        """Whether a tenant's jobs here are few enough for every price to be looked up at a pick."""
        queue = self._tenants.get(tenant)
        return queue is None or len(queue) <= EXACT_SIZE

    def samples(self, limit: int) -> Iterator[BoundJob]:
        """Yield up to ``limit`` jobs, with all lengths of prefill among them."""
        jobs = (queue.samples(limit) for queue in islice(self._tenants.values(), limit))
        return islice(chain.from_iterable(jobs), limit)

    def _left(self, bound: BoundJob) -> None:
        if not self._tenants[bound.job.tenant]:
            del self._tenants[bound.job.tenant]
        bound.worker_id = None
        self._seconds -= bound.planned.seconds
        self._count -= 1
        if not self._count:
            # Whatever rounding has left over must not add up over the days.
            self._seconds = 0.0
