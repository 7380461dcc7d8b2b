"""Which prefixes the scheduler asks workers to keep, and how long it says so."""

from collections import Counter
from dataclasses import replace

from support.waiting_jobs import key_of, make_job
from tidemill.protocol.messages import FinishedSequence, WorkerInfo, WorkerStatus
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.hints import MAX_WALKS
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings

#: Tokens that a worker's cache holds.
CAPACITY = 1600
GROUP = (1, 1, 1)
ANCHOR = key_of(GROUP)[-8:]


class Desk:
    """One worker that takes one job at a time, all jobs in prefix order; time stands still."""

    def __init__(self) -> None:
        settings = PolicySettings(scan_seconds=(float("inf"), 0.0, 0.0), tenant_quantum=1)
        self.scheduler = Scheduler(silent_seconds=5.0, settings=settings)
        self.info = WorkerInfo(
            worker_id="w",
            model="m",
            num_blocks=CAPACITY // 16,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            wire_version=1,
        )
        self.scheduler.add_worker(self.info, 0.0)
        self.running: list[str] = []
        self._num_commands = 0

    def add(self, num: int, path: tuple[int, ...] = GROUP, **values: object) -> None:
        for number in range(num):
            job = make_job((*path, 100 + number), cost=64 * (len(path) + 1))
            self.scheduler.add_job(replace(job, **values))  # type: ignore[arg-type]

    def waiting(self) -> list[WaitingJob]:
        """All jobs that wait."""
        jobs = map(self.scheduler.waiting_job, self.scheduler.waiting_ids)
        return [job for job in jobs if job is not None]

    def serve(self) -> dict[bytes, int]:
        """Let the next job out and run it; returns what the worker was told after it went out."""
        for dispatch in self.scheduler.tick(0.0):
            self._num_commands += 1
            self.running.append(dispatch.job.job_id)
            self.scheduler.sent(dispatch, f"1-{self._num_commands}")
        return self.told()

    def end(self, output_tokens: int = 0) -> dict[bytes, int]:
        """All running jobs end, of whose prompts but one token came from the cache."""
        ended = [
            FinishedSequence(job_id=job_id, cached_tokens=255, output_tokens=output_tokens)
            for job_id in self.running
        ]
        self.running = []
        status = WorkerStatus(
            last_command=f"1-{self._num_commands}",
            free_blocks=self.info.num_blocks,
            finished=tuple(ended),
        )
        self.scheduler.update_worker("w", status, 0.0)
        return self.told()

    def told(self) -> dict[bytes, int]:
        return {d: n for hint in self.scheduler.take_hints() for d, n in hint.refs.items()}


def test_a_group_is_hinted_once_and_dropped_when_its_last_job_went_out() -> None:
    desk = Desk()
    desk.add(4)

    told = []
    while desk.scheduler.num_waiting:
        told.append(desk.serve())
        told.append(desk.end())

    assert next(each for each in told if each)[ANCHOR] > 0
    assert [each for each in told if each][-1] == {ANCHOR: 0}
    assert sum(map(len, told)) == 2


def test_a_hint_is_repeated_while_its_group_lasts_once_the_cache_has_turned_over() -> None:
    desk = Desk()
    desk.add(40)
    assert desk.serve()[ANCHOR] > 0

    told = []
    for _ in range(6):
        told.append(desk.end(output_tokens=CAPACITY // 3).get(ANCHOR))
        desk.serve()

    repeats = [refs for refs in told if refs is not None]
    assert len(repeats) in (2, 3), "the cache has turned over twice, or a little more"
    assert 40 > repeats[0] > repeats[1] > 0


def test_a_group_whose_jobs_left_is_dropped_when_the_hint_would_be_repeated() -> None:
    desk = Desk()
    desk.add(10)
    desk.serve()
    for job_id in desk.scheduler.waiting_ids:
        desk.scheduler.remove_job(job_id)

    assert desk.end(output_tokens=CAPACITY) == {ANCHOR: 0}
    desk.add(1, path=(9,))
    desk.serve()
    assert desk.end(output_tokens=2 * CAPACITY) == {}, "it is told once that nobody waits"


def test_a_group_stays_hinted_while_another_tenant_has_its_turn() -> None:
    desk = Desk()
    desk.add(6, queue="p1:one")
    desk.add(6, path=(2, 2, 2), queue="p1:two")

    live: dict[bytes, int] = {}
    served = set()
    for _ in range(4):
        live |= desk.serve()
        served |= set(desk.running)
        live |= desk.end()

    assert {digest for digest, refs in live.items() if refs} == {ANCHOR, key_of((2, 2, 2))[-8:]}


def test_jobs_that_were_given_back_do_not_end_the_walk_of_their_line() -> None:
    desk = Desk()
    desk.add(6)
    assert desk.serve()[ANCHOR] > 0
    desk.end()
    desk.add(2, path=(5,), attempts=1)

    assert desk.serve() == {}


def test_a_worker_is_told_of_few_groups_at_a_time() -> None:
    desk = Desk()
    num_tenants = MAX_WALKS + 3
    for tenant in range(num_tenants):
        desk.add(20, path=(tenant, 7, 7), queue=f"p1:{tenant}")

    live: dict[bytes, int] = {}
    for _ in range(4 * num_tenants):
        live |= desk.serve()
        live |= desk.end()
        assert sum(refs > 0 for refs in live.values()) <= MAX_WALKS
    assert sum(refs > 0 for refs in live.values()) == MAX_WALKS


def test_a_prefix_stays_hinted_while_its_tenant_walks_it_at_another_priority() -> None:
    """The classes take turns, so that both lines are walked when the shorter one ends."""
    desk = Desk()
    desk.add(20, priority=0)
    desk.add(40, priority=1)

    live: dict[bytes, int] = {}
    num_waiting = Counter({0: 20, 1: 40})
    while num_waiting[1] > 20:
        live |= desk.serve()
        num_waiting = Counter(job.priority for job in desk.waiting())
        assert live[ANCHOR] > 0
        live |= desk.end(output_tokens=200)
    assert num_waiting[0] == 0


def test_a_worker_that_is_gone_is_told_nothing() -> None:
    desk = Desk()
    desk.add(3)
    assert desk.scheduler.tick(0.0)
    desk.scheduler.remove_worker("w")
    assert desk.scheduler.take_hints() == []


def test_who_orders_by_arrival_gives_no_hints() -> None:
    desk = Desk()
    desk.scheduler = Scheduler(silent_seconds=5.0, settings=PolicySettings(order="fifo"))
    desk.scheduler.add_worker(desk.info, 0.0)
    desk.add(6)

    for _ in range(3):
        assert desk.serve() == {}
        assert desk.end(output_tokens=CAPACITY) == {}
