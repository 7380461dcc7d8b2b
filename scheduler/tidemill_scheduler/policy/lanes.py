"""The waiting jobs of one model, and whose turn it is."""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from operator import itemgetter

from sortedcontainers import SortedDict

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.ageing import NUM_CLASSES, Ageing, class_of
from tidemill_scheduler.policy.fair_share import DeficitRoundRobin
from tidemill_scheduler.policy.fifo_lanes import FifoLanes
from tidemill_scheduler.policy.fleet import Fleet, UrgentFleet
from tidemill_scheduler.policy.interactive_lane import InteractiveLane
from tidemill_scheduler.policy.prefix_order import PrefixOrder
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.settings import PolicySettings
from tidemill_scheduler.policy.tenant_line import TenantLine

#: While jobs wait that have risen in class, so many others go out between two of theirs.
MAX_PASSED = 7

#: So many priorities have an interactive lane, and are remembered without jobs, with what their
#: tenants owe.
_MAX_LINES = 32

#: Whether a worker gives up half of a group it works on; None where nothing is to be taken over.
Yields = Callable[[str], bool] | None


class Lanes:
    """Orders by class, then by integer priority, then by tenant, then by lane.

    Jobs given back by a dead or draining worker come before everything, in prefix order: their
    readers have been waiting.  The classes interactive, standard and batch share the workers by
    weight while all of them wait.  Inside a class the lower integer goes first.  A job that has
    risen to the class that is served, see ``Ageing``, brings all jobs of its priority along, so
    that a common prefix stays together: after ``MAX_PASSED`` others one of that priority is next,
    and where several have risen, the one with the longest waiting job is.
    """

    def __init__(
        self,
        waiting: Mapping[str, WaitingJob],
        fleet: Fleet,
        residency: Residency,
        tokens_per_hash: int,
        settings: PolicySettings,
        *,
        age_seconds: float,
        weight_of: Callable[[str], float],
    ) -> None:
        self._fleet = fleet
        self._residency = residency
        self._tokens_per_hash = tokens_per_hash
        self._settings = settings
        self._weight_of = weight_of
        self._lines: SortedDict[int, TenantLine] = SortedDict()
        # The same by class, in order of priority.
        self._by_rank: list[list[tuple[int, TenantLine]]] = [[] for _ in range(NUM_CLASSES)]
        self._ageing = Ageing(waiting, age_seconds)
        self._shares: DeficitRoundRobin[int, str] = DeficitRoundRobin(settings.class_quantum)
        # All classes take part from the start, those without jobs keep their places.
        for rank in range(NUM_CLASSES):
            self._shares.activate(rank, settings.class_weights[rank])
        self._busy: set[int] = set()
        # The priority ahead of all others of the class whose turn it was last.
        self._head = 0
        self._num_passed = 0
        self._requeued = PrefixOrder(fleet.open_ids(), tokens_per_hash)
        self._num_jobs = [0] * NUM_CLASSES
        # Of all jobs, and of those that were given back: asked for in every decision.
        self._count = 0
        self._num_requeued = 0
        #: Prompt tokens that wait in each class, shared ones included.
        self.tokens = [0] * NUM_CLASSES

    def __len__(self) -> int:
        return self._count

    @property
    def num_requeued(self) -> int:
        """How many jobs wait that were given back."""
        return self._num_requeued

    @property
    def has_urgent(self) -> bool:
        """Whether interactive jobs wait beside others, which must not hold them up.

        Not where their class has used much more than its share: then the others go first.
        """
        if 0 not in self._busy or len(self._busy) == 1:
            return False
        burst = self._settings.urgent_seconds * self._fleet.tokens_per_second
        return self._shares.debt(0) <= burst

    @property
    def work(self) -> tuple[float, float, float]:
        """Prompt tokens that wait in each class and that no neighbour computes."""
        work = [0.0] * NUM_CLASSES
        for priority, line in self._lines.items():
            work[class_of(priority)] += line.work
        return (work[0] + self._requeued.work, work[1], work[2])

    def num_tenants(self, rank: int) -> int:
        """Return how many tenants have jobs in a class."""
        lines = [line for priority, line in self._lines.items() if class_of(priority) == rank]
        return len({tenant for line in lines for tenant in line.tenants})

    def num_jobs(self, rank: int) -> int:
        """Return how many jobs wait in a class, in the first those given back as well."""
        return self._num_jobs[rank] + (0 if rank else self._num_requeued)

    def add(self, job: WaitingJob, now: float) -> str | None:
        """Let a job wait; returns the worker that may take it next, if that is known."""
        if job.attempts:
            worker_id = self._requeued.add(job)
            self._num_requeued += 1
            self._count += 1
            return worker_id
        rank = class_of(job.priority)
        if job.priority not in self._lines:
            made = self._lines[job.priority] = self._make_line(rank)
            insort(self._by_rank[rank], (job.priority, made), key=itemgetter(0))
        self._busy.add(rank)
        self._num_jobs[rank] += 1
        self._count += 1
        self.tokens[rank] += job.cost
        self._ageing.add(job)
        line: TenantLine = self._lines[job.priority]
        is_interactive = len(self._lines) <= _MAX_LINES and self._is_interactive(rank)
        if not is_interactive and rank == NUM_CLASSES - 1:
            line.unbind_all()
        return line.add(job, now, is_interactive=is_interactive)

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        if job.attempts:
            self._requeued.remove(job.job_id)
            self._requeued_left()
            return
        self._lines[job.priority].remove(job)
        self._left(job)

    def take(self, job: WaitingJob, worker_id: str, tokens: float, now: float) -> bool:
        """Take a job out for a worker, at so many tokens to the account of class and tenant.

        Returns whether the tenant is charged, so that this may have to be corrected.
        """
        if job.attempts:
            self._requeued.take(job, worker_id)
            self._requeued_left()
            return False
        rank = class_of(job.priority)
        risen = self._risen(self._head, now)
        self._num_passed = self._num_passed + 1 if risen not in (None, job.priority) else 0
        is_charged = self._lines[job.priority].take(job, worker_id, tokens, now)
        # A class that is alone uses what nobody else wants.
        if len(self._busy) > 1:
            self._shares.charge(worker_id, rank, tokens)
        self._left(job)
        return bool(is_charged)

    def adjust(self, job: WaitingJob, tokens: float) -> None:
        """Correct what the tenant of a job that went out was charged."""
        line = self._lines.get(job.priority)
        if line is not None:
            line.adjust(job.tenant, tokens)

    def next_for(self, worker_id: str, now: float, yields: Yields) -> WaitingJob | None:
        """Return a worker's next job; with ``yields``, of another's share if it has none."""
        if self._num_requeued:
            job = self._requeued.peek(worker_id)
            if job is None and yields and self._requeued.claim_range(worker_id, yields):
                job = self._requeued.peek(worker_id)
            if job is not None:
                return job
        if len(self._busy) == 1:
            return self._next_of(next(iter(self._busy)), worker_id, now, yields)
        while (rank := self._shares.turn(worker_id, self._busy)) is not None:
            job = self._next_of(rank, worker_id, now, yields)
            if job is not None:
                return job
            self._shares.skip(worker_id)
        return None

    def urgent_for(self, worker_id: str, now: float) -> WaitingJob | None:
        """Return the next interactive job that is bound to a worker, if there is one."""
        if 0 not in self._busy:
            return None
        return self._next_of(0, worker_id, now, None)

    def is_bound(self, job: WaitingJob) -> bool:
        """Whether a job waits in the interactive lane, which has chosen its worker."""
        line = None if job.attempts else self._lines.get(job.priority)
        return line is not None and line.is_bound(job)

    def walks(self, worker_id: str) -> WaitingJob | None:
        """Return the next job of the batch lane that is the worker's to walk, if there is one."""
        return next((j for line in self._lines.values() if (j := line.walks(worker_id))), None)

    def follower(self, job: WaitingJob, worker_id: str) -> tuple[WaitingJob, PrefixOrder] | None:
        """Return who comes after a job that was taken for a worker from the batch lane."""
        line = None if job.attempts else self._lines.get(job.priority)
        return None if line is None else line.follower(job, worker_id)

    def refresh(self, worker_id: str) -> None:
        """Note that a worker has told of itself."""
        # Once for each status: iterating a sorted dictionary takes longer.
        for lines in self._by_rank:
            for _, line in lines:
                line.refresh(worker_id)

    def release(self, worker_id: str, now: float) -> None:
        """Forget a worker's place."""
        self._requeued.release(worker_id)
        self._shares.remove_server(worker_id)
        for line in self._lines.values():
            line.release(worker_id, now)

    def _next_of(self, rank: int, worker_id: str, now: float, yields: Yields) -> WaitingJob | None:
        # In every decision, and mostly one priority has jobs.
        lines = [entry for entry in self._by_rank[rank] if entry[1]]
        self._head = lines[0][0]
        if self._num_passed >= MAX_PASSED:
            risen = self._risen(self._head, now)
            line: TenantLine | None = None if risen is None else self._lines[risen]
            if line is not None and (job := line.next_for(worker_id, now, yields)) is not None:
                return job
        for _, line in lines:
            if (job := line.next_for(worker_id, now, yields)) is not None:
                return job
        return None

    def _risen(self, priority: int, now: float) -> int | None:
        """The priority that is to get a turn although another one is ahead of it."""
        if len(self._lines) < 2:
            return None
        job = self._ageing.risen(priority, now)
        # One that was set aside waits without a line.
        return None if job is None or job.priority not in self._lines else job.priority

    def _is_interactive(self, rank: int) -> bool:
        if not rank:
            return True
        if not len(self._fleet) or self._num_jobs[rank] > self._settings.max_bound[rank]:
            return False
        limit = self._settings.scan_seconds[rank]
        return self.tokens[rank] <= limit * self._fleet.tokens_per_second

    def _requeued_left(self) -> None:
        self._num_requeued -= 1
        self._count -= 1

    def _left(self, job: WaitingJob) -> None:
        rank = class_of(job.priority)
        self._num_jobs[rank] -= 1
        self._count -= 1
        self.tokens[rank] -= job.cost
        if not self._lines[job.priority] and len(self._lines) > _MAX_LINES:
            del self._lines[job.priority]
            lines = self._by_rank[rank]
            del lines[bisect_left(lines, job.priority, key=itemgetter(0))]
        if not self._num_jobs[rank]:
            self._busy.discard(rank)

    def _make_line(self, rank: int) -> TenantLine:
        loads = self._fleet if rank else UrgentFleet(self._fleet)
        lane = InteractiveLane(self._residency, loads)
        for worker in self._fleet:
            if worker.is_draining:
                # It would never take what is bound to it.
                lane.release(worker.info.worker_id, 0.0)
        return TenantLine(
            lane,
            self._make_order,
            quantum=self._settings.tenant_quantum,
            weight_of=self._weight_of,
        )

    def _make_order(self) -> PrefixOrder:
        return PrefixOrder(
            self._fleet.open_ids(), self._tokens_per_hash, is_stuck=self._fleet.is_stuck
        )


#: Either order of a model's waiting jobs.
AnyLanes = Lanes | FifoLanes
