"""Workers of which a test says how busy they are."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from support.waiting_jobs import make_job
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.intake.jobs import WaitingJob

#: Prefill takes a millisecond a token, whatever came before.
MILLISECOND_A_TOKEN = StepCost(base=0.0, per_token=1e-3, per_pair=0.0, per_context=0.0)


class FakeLoads:
    """``busy`` seconds and ``decoding`` loads by worker id, 0 where nothing is said."""

    def __init__(self, *worker_ids: str) -> None:
        self.workers = dict.fromkeys(worker_ids)
        self.busy: dict[str, float] = {}
        self.decoding: dict[str, float] = {}
        self.capacity: dict[str, int] = {}

    def ids(self) -> Collection[str]:
        return self.workers.keys()

    def busy_seconds(self, worker_id: str) -> float:
        return self.busy.get(worker_id, 0.0)

    def decode_load(self, worker_id: str) -> float:
        return self.decoding.get(worker_id, 0.0)

    def cost(self, worker_id: str) -> StepCost:
        assert worker_id in self.workers
        return MILLISECOND_A_TOKEN

    def can_hold(self, worker_id: str, job: WaitingJob) -> bool:
        return job.cost <= self.capacity.get(worker_id, 1 << 30)


def lane_job(
    path: Sequence[int] = (),
    *,
    cost: int = 1000,
    since: float = 0.0,
    tenant: str = "t",
    deadline: float = float("inf"),
) -> WaitingJob:
    """Return a job that waits since ``since`` and must end by ``deadline``."""
    job = make_job(path, cost=cost)
    return replace(job, queue=f"p0:{tenant}", since=since, deadline=deadline)
