"""The waiting jobs of one integer priority: the tenants take turns, each in prefix order."""

from collections.abc import Callable, Collection

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.either import Either
from tidemill_scheduler.policy.fair_share import DeficitRoundRobin
from tidemill_scheduler.policy.interactive_lane import InteractiveLane
from tidemill_scheduler.policy.prefix_order import PrefixOrder

#: Tenants that are asked for a job for a worker before it is told that there is none.
_MAX_TURNS = 8

#: A tenant whose groups keep others from serving it has them split after so many rounds without a
#: turn.
_MAX_ROUNDS_BEHIND = 1.25


class TenantLine:
    """Keeps each job in one of two lanes; tenants are served by deficit round robin over both.

    The *interactive lane* binds a job to a worker at once and lets it move until it is sent.  The
    *batch lane* has a ``PrefixOrder`` for each tenant: the keys of tenants never meet, because
    their salts differ.
    """

    def __init__(
        self,
        interactive: InteractiveLane,
        make_order: Callable[[], PrefixOrder],
        *,
        quantum: int,
        weight_of: Callable[[str], float],
    ) -> None:
        self._interactive = interactive
        self._make_order = make_order
        self._weight_of = weight_of
        self._shares: DeficitRoundRobin[str, str] = DeficitRoundRobin(quantum)
        self._orders: dict[str, PrefixOrder] = {}
        self._num_jobs: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._num_jobs.values())

    def __bool__(self) -> bool:
        return bool(self._num_jobs)

    @property
    def tenants(self) -> Collection[str]:
        """Whose jobs wait here."""
        return self._num_jobs.keys()

    @property
    def work(self) -> float:
        """Prompt tokens that wait and that no neighbour computes."""
        return self._interactive.work + sum(order.work for order in self._orders.values())

    def add(self, job: WaitingJob, now: float, *, is_interactive: bool) -> str | None:
        """Let a job wait in one of the lanes; returns whose turn it is to take it, if known."""
        tenant = job.tenant
        # Not only with its first job: its weight may have changed.
        self._shares.activate(tenant, self._weight_of(tenant))
        self._num_jobs[tenant] = self._num_jobs.get(tenant, 0) + 1
        # A tenant's bound jobs go first, so that none may come while others wait in its order.
        if is_interactive and tenant not in self._orders:
            return self._interactive.add(job, now)
        return self._order_of(tenant).add(job)

    def unbind_all(self) -> None:
        """Put all jobs of the interactive lane in prefix order, for there are many now."""
        for job in self._interactive.jobs():
            self._interactive.remove(job)
            self._order_of(job.tenant).add(job)

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        if job in self._interactive:
            self._interactive.remove(job)
        else:
            self._orders[job.tenant].remove(job.job_id)
        self._left(job)

    def take(self, job: WaitingJob, worker_id: str, tokens: float, now: float) -> bool:
        """Take a job out for a worker; returns whether its tenant is charged so many tokens."""
        if job in self._interactive:
            self._interactive.take(job, worker_id, now)
        else:
            self._orders[job.tenant].take(job, worker_id)
        # A tenant that is alone uses what nobody else wants.
        is_charged = len(self._num_jobs) > 1
        if is_charged:
            self._shares.charge(worker_id, job.tenant, tokens)
        self._left(job)
        return is_charged

    def adjust(self, tenant: str, tokens: float) -> None:
        """Correct what a tenant was charged."""
        self._shares.adjust(tenant, tokens)

    def next_for(
        self, worker_id: str, now: float, yields: Callable[[str], bool] | None
    ) -> WaitingJob | None:
        """Return the job that a worker is to get next, None if there is none for it.

        ``yields(owner)`` tells whether that worker gives up half of a group it works on; without
        it, nothing is taken over from others.
        """
        if len(self._num_jobs) == 1:
            [tenant] = self._num_jobs
            job = self._next_of(tenant, worker_id, now, yields)
            return job or (None if yields is None else self._steal(worker_id, now))
        # A group is split only for a worker that finds nothing else.
        job = self._in_turn(worker_id, now, None if yields is None else _never)
        if job is not None or yields is None:
            return job
        job = self._in_turn(worker_id, now, yields)
        return job or self._steal(worker_id, now)

    def is_bound(self, job: WaitingJob) -> bool:
        """Whether a job waits in the interactive lane."""
        return job in self._interactive

    def walks(self, worker_id: str) -> WaitingJob | None:
        """Return the next job in what a worker walks of the batch lane, if there is one."""
        orders = self._orders.values()
        return next((job for o in orders if (job := o.peek(worker_id)) is not None), None)

    def follower(self, job: WaitingJob, worker_id: str) -> tuple[WaitingJob, PrefixOrder] | None:
        """Return who comes after a job that was taken for a worker from the batch lane."""
        order = self._orders.get(job.tenant)
        following = order.peek(worker_id) if order is not None else None
        return None if order is None or following is None else (following, order)

    def refresh(self, worker_id: str) -> None:
        """Note that a worker has told of itself."""
        if len(self._interactive):
            self._interactive.refresh(worker_id)

    def release(self, worker_id: str, now: float) -> None:
        """Forget a worker; what was bound to it or lay in its ranges is anyone's."""
        self._interactive.release(worker_id, now)
        self._shares.remove_server(worker_id)
        for order in self._orders.values():
            order.release(worker_id)

    def _in_turn(
        self, worker_id: str, now: float, yields: Callable[[str], bool] | None
    ) -> WaitingJob | None:
        for _ in range(_MAX_TURNS):
            tenant = self._shares.turn(worker_id, self._choices(worker_id))
            if tenant is None:
                return None
            job = self._next_of(tenant, worker_id, now, yields)
            if job is not None:
                return job
            self._shares.skip(worker_id)
        return None

    def _choices(self, worker_id: str) -> Collection[str] | None:
        bound = self._bound_tenants(worker_id)
        if not self._orders:
            return bound
        if not len(self._interactive):
            return None
        return Either(bound, self._orders)

    def _next_of(
        self, tenant: str, worker_id: str, now: float, yields: Callable[[str], bool] | None
    ) -> WaitingJob | None:
        if tenant in self._bound_tenants(worker_id):
            return self._interactive.peek(worker_id, tenant, now)
        order = self._orders.get(tenant)
        if order is None:
            return None
        job = order.peek(worker_id)
        if job is not None or yields is None:
            return job
        is_behind = self._shares.rounds_behind(tenant) >= _MAX_ROUNDS_BEHIND
        if order.claim_range(worker_id, yields, at_any_cost=is_behind):
            job = order.peek(worker_id)
        return job

    def _bound_tenants(self, worker_id: str) -> Collection[str]:
        # An empty lane is not asked: it would begin to follow all workers.
        return self._interactive.tenants(worker_id) if len(self._interactive) else ()

    def _steal(self, worker_id: str, now: float) -> WaitingJob | None:
        return self._interactive.steal(worker_id, now) if len(self._interactive) else None

    def _order_of(self, tenant: str) -> PrefixOrder:
        if tenant not in self._orders:
            self._orders[tenant] = self._make_order()
        return self._orders[tenant]

    def _left(self, job: WaitingJob) -> None:
        tenant = job.tenant
        order = self._orders.get(tenant)
        if order is not None and not len(order):
            del self._orders[tenant]
        self._num_jobs[tenant] -= 1
        if not self._num_jobs[tenant]:
            del self._num_jobs[tenant]
            self._shares.deactivate(tenant)


def _never(owner: str) -> bool:
    return False
