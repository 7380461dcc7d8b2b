"""The simplest policy there is: first come, first served, by the worker with the most credit."""

from collections import deque
from heapq import heapify, heappop, heappush

from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.placement import Dispatch


class FifoPolicy:
    """Keeps each worker supplied with up to ``steps_ahead`` step budgets of prompt tokens."""

    def __init__(self, steps_ahead: float = 1.0) -> None:
        self.is_unfinished = False
        self._steps_ahead = steps_ahead
        self._queue: deque[WaitingJob] = deque()
        self._budgets: dict[str, int] = {}
        self._outstanding: dict[str, dict[str, tuple[int, int]]] = {}
        self._reported: dict[str, int] = {}
        self._hungry: list[tuple[int, str]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def add_job(self, job: WaitingJob) -> WaitingJob | None:
        if job.attempts:
            self._queue.appendleft(job)
        else:
            self._queue.append(job)
        return None

    def forget(self, job_id: str) -> bool:
        kept = [job for job in self._queue if job.job_id != job_id]
        is_found = len(kept) < len(self._queue)
        self._queue = deque(kept)
        return is_found

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        self._budgets[info.worker_id] = int(info.max_num_batched_tokens * self._steps_ahead)
        self._outstanding[info.worker_id] = {}
        self._reported[info.worker_id] = 0
        heappush(self._hungry, (0, info.worker_id))

    def remove_worker(self, worker_id: str) -> None:
        for owned in (self._budgets, self._outstanding, self._reported):
            del owned[worker_id]
        self._hungry = [entry for entry in self._hungry if entry[1] != worker_id]
        heapify(self._hungry)

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        last = int(status.last_command.partition("-")[2])
        flying = self._outstanding[worker_id]
        for job_id in [job_id for job_id, (number, _) in flying.items() if number <= last]:
            del flying[job_id]
        self._reported[worker_id] = status.waiting_tokens
        heappush(self._hungry, (self._load(worker_id), worker_id))

    def tick(self, now: float) -> list[Dispatch]:
        dispatches: list[Dispatch] = []
        while self._queue and self._hungry:
            load, worker_id = heappop(self._hungry)
            if load != self._load(worker_id) or load >= self._budgets[worker_id]:
                continue
            job = self._queue.popleft()
            self._outstanding[worker_id][job.job_id] = (1 << 62, job.cost)
            heappush(self._hungry, (self._load(worker_id), worker_id))
            dispatches.append(Dispatch(job, worker_id, job.cost))
        return dispatches

    def sent(self, dispatch: Dispatch, command_id: str) -> None:
        number = int(command_id.partition("-")[2])
        self._outstanding[dispatch.worker_id][dispatch.job.job_id] = (number, dispatch.tokens)

    def dropped(self, dispatch: Dispatch) -> None:
        del self._outstanding[dispatch.worker_id][dispatch.job.job_id]

    def _load(self, worker_id: str) -> int:
        flying = sum(tokens for _, tokens in self._outstanding[worker_id].values())
        return self._reported[worker_id] + flying
