"""The workers of one model, and how fast each of them is."""

from collections.abc import Iterator, KeysView
from typing import NamedTuple

from tidemill.protocol.messages import WorkerStatus
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob

_DEFAULT_COST = StepCost()

#: A worker not heard of lately counts as busy for so long: it may be about to be found dead.
_STALE_SECONDS = 60.0

#: What a worker walks is kept for it until it has been full for so long.
_STUCK_SECONDS = 5.0

#: A worker without a slot counts as busy for so long: nobody knows when a sequence ends.
_FULL_SECONDS = 5.0

#: What earlier steps weigh beside the newest one, for the speed of a worker that has not fitted its
#: own costs yet.
_EARLIER_SHARE = 0.8


class _StepTimes(NamedTuple):
    """Seconds of the latest steps: those they took, and those that ``_DEFAULT_COST`` predicts."""

    taken: float = 0.0
    predicted: float = 0.0

    def after(self, step: StepFeatures) -> "_StepTimes":
        """Return the times with another step."""
        return _StepTimes(
            _EARLIER_SHARE * self.taken + step.seconds,
            _EARLIER_SHARE * self.predicted + _DEFAULT_COST.predict(step),
        )

    @property
    def cost(self) -> StepCost:
        """The default cost, as many times slower as the steps were."""
        factor = self.taken / self.predicted
        return StepCost(
            base=factor * _DEFAULT_COST.base,
            per_token=factor * _DEFAULT_COST.per_token,
            per_pair=factor * _DEFAULT_COST.per_pair,
            per_context=factor * _DEFAULT_COST.per_context,
        )


class Fleet:
    """Answers for every worker id; raises ``KeyError`` for one that is not here."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._costs: dict[str, StepCost] = {}
        # Of those that have not fitted their own costs yet.
        self._step_times: dict[str, _StepTimes] = {}
        self._stale: frozenset[str] = frozenset()
        self._stuck: frozenset[str] = frozenset()
        # Those that take more work, in the order they came.
        self._open: dict[str, None] = {}
        #: Prompt tokens that all workers compute in a second; 0 without workers.
        self.tokens_per_second = 0.0

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._workers

    def __getitem__(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def get(self, worker_id: str) -> Worker | None:
        """Return a worker if it is here."""
        return self._workers.get(worker_id)

    def ids(self) -> KeysView[str]:
        """The ids of all workers."""
        return self._workers.keys()

    def open_ids(self) -> KeysView[str]:
        """The ids of the workers that take more work; it shows how things stand at any time."""
        return self._open.keys()

    def drains(self, worker_id: str) -> None:
        """Note that a worker takes no more work."""
        self._open.pop(worker_id, None)

    def add(self, worker: Worker) -> None:
        """Take in a worker, of whose speed nothing is known."""
        self._workers[worker.info.worker_id] = worker
        self._open[worker.info.worker_id] = None
        self._set_cost(worker.info.worker_id, _DEFAULT_COST)

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        self.tokens_per_second -= _speed(self._costs.pop(worker_id))
        del self._workers[worker_id]
        self._step_times.pop(worker_id, None)
        self._open.pop(worker_id, None)
        if not self._workers:
            self.tokens_per_second = 0.0

    def look_around(self, now: float, fresh_since: float) -> None:
        """Note who was not heard of since then, and who has had no room for some seconds."""
        self._stale = frozenset(i for i, w in self._workers.items() if w.heard_at <= fresh_since)
        full = (
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.full_since is not None and now - worker.full_since >= _STUCK_SECONDS
        )
        self._stuck = self._stale.union(full)

    def is_stuck(self, worker_id: str) -> bool:
        """Whether a worker is silent, or full for so long that others need not wait for it."""
        return worker_id in self._stuck

    def learn(self, worker_id: str, status: WorkerStatus) -> None:
        """Take in what a status says about the worker's speed."""
        if worker_id in self._stale:
            self._stale -= {worker_id}
        # Where tokens were free, workers would look alike whatever their caches hold.
        if (fitted := status.step_cost) is not None and fitted.per_token:
            self._step_times.pop(worker_id, None)
            self._set_cost(worker_id, fitted)
        elif (step := status.step) is not None and step.prefill_tokens and step.seconds:
            # What each term costs is not to be told from a few steps: one of three tokens behind a
            # long cached prefix takes hardly less than one of hundreds.
            times = self._step_times.get(worker_id, _StepTimes()).after(step)
            self._step_times[worker_id] = times
            self._set_cost(worker_id, times.cost)

    def cost(self, worker_id: str) -> StepCost:
        """Return what steps of a worker cost."""
        return self._costs[worker_id]

    def busy_seconds(self, worker_id: str) -> float:
        """Return how long a worker has to prefill what it was given already."""
        return self.seconds(worker_id, self._workers[worker_id].outstanding_tokens)

    def decode_load(self, worker_id: str) -> float:
        """Return the share of a worker's sequence slots in use."""
        worker = self._workers[worker_id]
        return worker.num_seqs / worker.info.max_num_seqs

    def can_hold(self, worker_id: str, job: WaitingJob) -> bool:
        """Whether a job fits into the worker's KV pool at all."""
        return self._workers[worker_id].can_hold(job)

    def seconds(self, worker_id: str, tokens: int) -> float:
        """Return how long a worker has to prefill so many tokens."""
        seconds = tokens * self._costs[worker_id].per_token
        if worker_id in self._stale:
            seconds += _STALE_SECONDS
        return seconds + _FULL_SECONDS if self._workers[worker_id].is_full else seconds

    def _set_cost(self, worker_id: str, cost: StepCost) -> None:
        known = self._costs.get(worker_id)
        if known is cost:
            return
        self.tokens_per_second += _speed(cost) - (_speed(known) if known else 0.0)
        self._costs[worker_id] = cost


class UrgentFleet:
    """The same workers as an interactive job sees them: only others of its class are in its way."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.ids = fleet.ids
        self.decode_load = fleet.decode_load
        self.can_hold = fleet.can_hold
        self.cost = fleet.cost

    def busy_seconds(self, worker_id: str) -> float:
        """Return how long a worker has to prefill the interactive jobs it was given already."""
        return self._fleet.seconds(worker_id, self._fleet[worker_id].urgent_tokens)


def _speed(cost: StepCost) -> float:
    return 1.0 / cost.per_token
