"""Everything about one model: its waiting jobs, its workers, and who gets what."""

import math
from collections.abc import Callable, Iterator

from tidemill.protocol.messages import WorkerStatus
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.fleet.quarantine import SUSPECT_CRASHES, Quarantine
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.intake.large_jobs import LargeJobs
from tidemill_scheduler.policy.accounts import Accounts, Running
from tidemill_scheduler.policy.fifo_lanes import FifoLanes
from tidemill_scheduler.policy.fleet import Fleet
from tidemill_scheduler.policy.hints import Hint, Hints
from tidemill_scheduler.policy.lanes import AnyLanes, Lanes
from tidemill_scheduler.policy.placement import Dispatch, Moment, Placement
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.settings import PolicySettings

#: Every so often all workers are looked at, whatever was heard of them.
_LOOK_AROUND_SECONDS = 1.0


class ModelDesk:
    """Decides for one model; ``waiting`` are all jobs that wait, of this model and others, by id.

    What goes out is taken from it.

    Jobs that crashed workers wait in quarantine, and those larger than some worker's whole KV pool
    apart: the worker that is to take the next one of them gets nothing else until it has the room.
    """

    def __init__(
        self,
        model: str,
        waiting: dict[str, WaitingJob],
        settings: PolicySettings,
        block_size: int,
        *,
        age_seconds: float,
        weight_of: Callable[[str], float],
    ) -> None:
        self.model = model
        self._waiting = waiting
        self.block_size = block_size
        tokens_per_hash = ROUTING_STRIDE * block_size
        self.fleet = Fleet()
        self.residency = Residency(tokens_per_hash)
        self.lanes: AnyLanes = (
            FifoLanes()
            if settings.order == "fifo"
            else Lanes(
                waiting,
                self.fleet,
                self.residency,
                tokens_per_hash,
                settings,
                age_seconds=age_seconds,
                weight_of=weight_of,
            )
        )
        self._accounts = Accounts(settings.output_weight)
        self._hints = Hints(self.lanes, self.residency.group_depth)
        self._placement = Placement(
            waiting,
            self.lanes,
            self.fleet,
            self.residency,
            self._accounts,
            self._hints,
            tokens_per_hash=tokens_per_hash,
        )
        self._quarantine = Quarantine()
        self._large = LargeJobs()
        self._looked_around = -math.inf

    def __len__(self) -> int:
        return len(self.lanes) + len(self._quarantine) + len(self._large)

    @property
    def is_unfinished(self) -> bool:
        """Whether another ``fill`` could decide more at once."""
        return self._placement.is_unfinished

    def add(self, job: WaitingJob, now: float) -> None:
        """Let a job wait."""
        if job.crashes >= SUSPECT_CRASHES:
            self._quarantine.add(job)
            return
        worker_id = self.lanes.add(job, now)
        if worker_id is not None:
            self._placement.wake(worker_id)
        self._placement.wake_idle()

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        if job.job_id in self._large:
            self._large.remove(job)
        elif job.crashes >= SUSPECT_CRASHES:
            self._quarantine.remove(job)
        else:
            self.lanes.remove(job)

    def add_worker(self, worker: Worker) -> None:
        """Let a worker take jobs."""
        worker_id = worker.info.worker_id
        self.fleet.add(worker)
        self.residency.add_worker(worker_id, worker.info.num_blocks // ROUTING_STRIDE)
        self._placement.wake_all()

    def remove_worker(self, worker_id: str, now: float) -> None:
        """Forget a worker with its credit, its cache and its place."""
        self._placement.forget(worker_id)
        self.fleet.remove(worker_id)
        self.residency.remove_worker(worker_id)
        self.lanes.release(worker_id, now)
        self._accounts.idle(worker_id)
        self._hints.forget(worker_id)
        self._placement.wake_all()

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Take in a worker's status; raises ``MalformedMessage``."""
        worker = self.fleet[worker_id]
        if status.draining and not worker.is_draining:
            # Its jobs would wait for it in vain; it never takes up work again under this id.
            self.fleet.drains(worker_id)
            self.lanes.release(worker_id, now)
        worker.update(status, now)
        self.fleet.learn(worker_id, status)
        for sequence in status.finished:
            running = self._accounts.finished(worker_id, sequence)
            if running is not None:
                if running.charged is not None:
                    cost = self._accounts.cost(running.job, sequence)
                    self.lanes.adjust(running.job, cost - running.charged)
                self.residency.arrived(worker_id, running.job.kv_key)
                computed = max(0, running.job.cost - sequence.cached_tokens)
                self._hints.computed(worker, computed + sequence.output_tokens)
        if worker.num_seqs == 0:
            for running in self._accounts.idle(worker_id):
                self.residency.arrived(worker_id, running.job.kv_key)
        self.lanes.refresh(worker_id)
        self._placement.wake(worker_id)

    def fill(self, limit: int, moment: Moment) -> list[Dispatch]:
        """Decide up to ``limit`` times; each decision is charged until ``sent`` or ``dropped``."""
        if moment.now - self._looked_around >= _LOOK_AROUND_SECONDS:
            self._looked_around = moment.now
            self.fleet.look_around(moment.now, moment.fresh_since)
            self._placement.wake_all()
        if not (len(self._quarantine) or len(self._large)):
            dispatches = self._placement.run(limit, moment)
        else:
            barred: set[str] = set()
            dispatches = list(self._fill_apart(limit, moment, barred))
            dispatches += self._placement.run(limit - len(dispatches), moment, barred)
        for job in self._placement.too_large:
            self._large.add(job, moment.now)
        return dispatches

    def sent(self, dispatch: Dispatch, command_id: str, now: float) -> None:
        """The dispatch was written as this entry of the worker's command stream."""
        worker = self.fleet.get(dispatch.worker_id)
        if worker is not None:
            num_seqs = worker.num_seqs
            worker.sent(dispatch.job.job_id, command_id, now)
            if worker.num_seqs < num_seqs:
                self._placement.wake(dispatch.worker_id)

    def dropped(self, dispatch: Dispatch) -> None:
        """The job was not queued any more, or the worker's status already counts it."""
        worker_id, job = dispatch.worker_id, dispatch.job
        worker = self.fleet.get(worker_id)
        if worker is None:
            return
        worker.drop(job.job_id)
        running = self._accounts.returned(worker_id, job.job_id)
        if running is not None:
            if running.charged is not None:
                self.lanes.adjust(job, -running.charged)
            self.residency.forget(worker_id, job.kv_key)
        self._placement.wake(worker_id)

    def take_hints(self) -> list[Hint]:
        """Return what workers are to keep in their caches for jobs that come next."""
        return self._hints.take()

    def find_hopeless(
        self, now: float, patience: float, limit: int
    ) -> Iterator[tuple[WaitingJob, int]]:
        """Return jobs that no worker could hold for so many seconds, with what the largest can."""
        workers = list(self.fleet)
        if workers:
            capacity = max(worker.capacity for worker in workers)
            for job in self._large.find_hopeless(workers, now, patience, limit):
                yield job, capacity

    def is_runnable(self, silent_since: float) -> bool:
        """Whether a job waits while a worker for it has nothing to do, or none of them speaks."""
        workers = [worker for worker in self.fleet if not worker.is_draining]
        speaking = [worker for worker in workers if worker.heard_at >= silent_since]
        if speaking:
            return bool(len(self.lanes)) and any(map(self._could_run, speaking))
        return bool(workers) and bool(len(self))

    def _could_run(self, worker: Worker) -> bool:
        # Jobs may wait for another worker that has their prefix, rightly.
        has_nothing = self._placement.has_nothing_for(worker.info.worker_id)
        return worker.num_seqs == 0 and not has_nothing

    def _fill_apart(self, limit: int, moment: Moment, barred: set[str]) -> Iterator[Dispatch]:
        """Give out quarantined and large jobs; workers that must take nothing else are barred."""
        workers = {w.info.worker_id: w for w in self.fleet if _is_open(w, moment)}
        ward, suspect = self._quarantine.admit(workers, moment.fresh_since)
        if ward is not None:
            barred.add(ward)
            worker = workers.pop(ward)
            if suspect is not None:
                limit -= 1
                yield self._give(suspect, worker)
        for _ in range(limit):
            large_worker, job = self._large.admit(workers.values(), moment.fresh_since)
            if large_worker is None:
                return
            if job is None:
                barred.add(large_worker.info.worker_id)
                return
            yield self._give(job, large_worker)

    def _give(self, job: WaitingJob, worker: Worker) -> Dispatch:
        worker_id = worker.info.worker_id
        is_urgent = job.priority_class == 0
        worker.reserve(job.job_id, job.cost, is_urgent=is_urgent, num_seqs=job.num_outputs)
        self.residency.dispatched(worker_id, job.kv_key)
        self._accounts.charged(worker_id, Running(job, None))
        del self._waiting[job.job_id]
        return Dispatch(job, worker_id, job.cost)


def _is_open(worker: Worker, moment: Moment) -> bool:
    return not worker.is_draining and worker.heard_at >= moment.silent_since
