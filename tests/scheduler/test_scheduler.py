"""Which job goes to which worker: the pure scheduler with workers that a test makes up."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.played_shard import is_within_credit
from support.waiting_jobs import make_job
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import MAX_PER_TICK, Scheduler

GROUP = (1, 1, 1)
GROUP_TOKENS = 192


def make_info(name: str, **values: object) -> WorkerInfo:
    defaults = {
        "worker_id": name,
        "model": "m",
        "num_blocks": 10_000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "wire_version": 1,
    }
    return WorkerInfo.model_validate(defaults | values)


def make_scheduler(*names: str, **values: object) -> Scheduler:
    scheduler = Scheduler(silent_seconds=5.0)
    for name in names:
        scheduler.add_worker(make_info(name, **values), 0.0)
    return scheduler


def add(scheduler: Scheduler, num: int, path: tuple[int, ...] = (), **values: object) -> list[str]:
    jobs = [make_job(path, **values) for _ in range(num)]  # type: ignore[arg-type]
    for job in jobs:
        scheduler.add_job(job)
    return [job.job_id for job in jobs]


def by_worker(dispatches: list[Dispatch]) -> Counter[str]:
    return Counter(dispatch.worker_id for dispatch in dispatches)


def job_ids(dispatches: list[Dispatch]) -> list[str]:
    return [dispatch.job.job_id for dispatch in dispatches]


def test_nothing_is_dispatched_without_a_worker() -> None:
    scheduler = make_scheduler()
    add(scheduler, 3)

    assert scheduler.tick(0.0) == []
    assert scheduler.num_waiting == 3


def test_a_job_goes_only_to_a_worker_that_serves_its_model() -> None:
    scheduler = make_scheduler("a")
    scheduler.add_worker(make_info("other", model="other"), 0.0)
    add(scheduler, 1, model="other")
    add(scheduler, 2, model="unserved")

    assert by_worker(scheduler.tick(0.0)) == {"other": 1}
    assert scheduler.num_waiting == 2


def test_requeued_jobs_go_first_then_lower_priorities() -> None:
    scheduler = make_scheduler("a")
    [batch] = add(scheduler, 1, priority=7)
    [later] = add(scheduler, 1, priority=-1)
    [standard] = add(scheduler, 1, priority=0)
    [urgent] = add(scheduler, 1, priority=-5)
    [requeued] = add(scheduler, 1, priority=9, attempts=1)

    assert job_ids(scheduler.tick(0.0)) == [requeued, urgent, later, standard, batch]


def test_jobs_with_equal_keys_keep_the_order_of_submission() -> None:
    scheduler = make_scheduler("a")
    ids = add(scheduler, 5, GROUP, cost=200)

    assert job_ids(scheduler.tick(0.0)) == ids


def test_jobs_without_a_common_prefix_are_spread_evenly() -> None:
    scheduler = make_scheduler("a", "b")
    for label in range(8):
        add(scheduler, 1, (label, label, label), cost=200)

    assert by_worker(scheduler.tick(0.0)) == {"a": 4, "b": 4}


def test_followers_go_where_their_leader_is() -> None:
    scheduler = make_scheduler("a", "b")
    add(scheduler, 6, GROUP, cost=GROUP_TOKENS + 10)

    assert len(by_worker(scheduler.tick(0.0))) == 1


def test_a_follower_that_comes_later_goes_where_the_prefix_is() -> None:
    scheduler = make_scheduler("a", "b")
    add(scheduler, 1, GROUP, cost=200)
    [leader] = scheduler.tick(0.0)
    add(scheduler, 1, (5, 5, 5), cost=200)
    [other] = scheduler.tick(0.0)
    assert other.worker_id != leader.worker_id
    for dispatch in (leader, other):
        scheduler.sent(dispatch, "5-0")
        status = WorkerStatus(last_command="5-0", num_running=1, free_blocks=9000)
        scheduler.update_worker(dispatch.worker_id, status, 1.0)

    add(scheduler, 1, (*GROUP, 9), cost=200)
    add(scheduler, 1, (5, 5, 5, 9), cost=200)

    placed = {d.job.key[:8]: d.worker_id for d in scheduler.tick(1.0)}
    assert placed == {leader.job.key[:8]: leader.worker_id, other.job.key[:8]: other.worker_id}


def test_a_group_is_split_once_its_worker_is_full_and_another_idle() -> None:
    scheduler = make_scheduler("a", "b", max_num_batched_tokens=256)
    add(scheduler, 30, GROUP, cost=GROUP_TOKENS + 60)

    spread = by_worker(scheduler.tick(0.0))

    assert set(spread) == {"a", "b"}


def test_a_group_is_split_before_one_worker_runs_it_all_and_another_nothing() -> None:
    scheduler = make_scheduler("a", "b")
    add(scheduler, 20, GROUP, cost=GROUP_TOKENS + 1)

    spread = by_worker(scheduler.tick(0.0))

    assert max(spread.values()) - min(spread.values()) <= 64 // 8


def test_a_shared_prefix_is_charged_once() -> None:
    scheduler = make_scheduler("a")
    add(scheduler, 2, GROUP, cost=GROUP_TOKENS + 10)

    assert [d.tokens for d in scheduler.tick(0.0)] == [GROUP_TOKENS + 10, 10]


def test_a_job_above_the_credit_queues_behind_less_than_a_step_and_no_other_behind_it() -> None:
    scheduler = make_scheduler("a", max_num_batched_tokens=100)
    add(scheduler, 3, cost=5000)

    [first] = scheduler.tick(0.0)
    scheduler.sent(first, "5-0")
    assert scheduler.tick(0.0) == []

    def tell(waiting_tokens: int) -> None:
        status = WorkerStatus(
            last_command="5-0", num_running=1, waiting_tokens=waiting_tokens, free_blocks=900
        )
        scheduler.update_worker("a", status, 1.0)

    tell(100)
    assert scheduler.tick(1.0) == []
    tell(99)
    assert len(scheduler.tick(1.0)) == 1
    assert scheduler.tick(1.0) == []


def test_a_worker_gets_the_step_that_runs_and_one_ahead() -> None:
    scheduler = make_scheduler("a", max_num_batched_tokens=1000)
    add(scheduler, 30, cost=90)

    assert len(scheduler.tick(0.0)) == 2000 // 90


def test_a_worker_without_free_blocks_gets_nothing_while_it_runs_something() -> None:
    scheduler = make_scheduler("a")
    add(scheduler, 1, cost=160)
    scheduler.update_worker("a", WorkerStatus(num_running=1, free_blocks=10), 0.0)
    assert scheduler.tick(0.0) == []

    scheduler.update_worker("a", WorkerStatus(num_running=1, free_blocks=11), 0.0)
    assert len(scheduler.tick(0.0)) == 1


def test_sequence_slots_leave_room_for_a_shallow_local_queue() -> None:
    scheduler = make_scheduler("a", max_num_seqs=16)
    add(scheduler, 40, cost=1)

    assert len(scheduler.tick(0.0)) == 16 + 2


@pytest.mark.parametrize("status", [WorkerStatus(draining=True, free_blocks=100)])
def test_a_draining_worker_gets_nothing(status: WorkerStatus) -> None:
    scheduler = make_scheduler("a")
    add(scheduler, 1)
    scheduler.update_worker("a", status, 0.0)

    assert scheduler.tick(0.0) == []


def test_a_silent_worker_gets_nothing_until_it_speaks_again() -> None:
    scheduler = make_scheduler("a")
    add(scheduler, 1)

    assert scheduler.tick(5.1) == []
    scheduler.update_worker("a", WorkerStatus(free_blocks=100), 6.0)
    assert len(scheduler.tick(6.0)) == 1


def test_the_jobs_in_a_dead_workers_range_go_to_another() -> None:
    scheduler = make_scheduler("a", max_num_seqs=1)
    ids = add(scheduler, 10, GROUP, cost=GROUP_TOKENS + 1)
    taken = job_ids(scheduler.tick(0.0))
    scheduler.remove_worker("a")
    scheduler.add_worker(make_info("b"), 0.0)

    assert sorted(taken + job_ids(scheduler.tick(0.0))) == sorted(ids)


def test_a_dropped_dispatch_gives_its_credit_back() -> None:
    scheduler = make_scheduler("a", max_num_seqs=1)
    add(scheduler, 3)
    first = scheduler.tick(0.0)
    assert scheduler.tick(0.0) == []

    scheduler.dropped(first[0])

    assert len(first) == 2
    assert len(scheduler.tick(0.0)) == 1


def test_a_status_may_cover_a_command_before_its_reply_arrives() -> None:
    scheduler = make_scheduler("a", max_num_seqs=1)
    add(scheduler, 5)
    first, second = scheduler.tick(0.0)
    scheduler.update_worker("a", WorkerStatus(last_command="7-1", free_blocks=100), 0.0)
    assert scheduler.tick(0.0) == []

    scheduler.sent(first, "7-0")
    scheduler.sent(second, "7-1")

    assert len(scheduler.tick(0.0)) == 2


def test_a_newer_pointer_replaces_the_older_one_of_its_job() -> None:
    scheduler = make_scheduler("a")
    old, new = make_job(job_id="j"), make_job(job_id="j", attempts=1)

    assert scheduler.add_job(old) is None
    assert scheduler.add_job(old) is None
    assert scheduler.add_job(new) == old
    assert [d.job for d in scheduler.tick(0.0)] == [new]


def test_a_worker_not_heard_of_lately_gets_only_what_others_have_no_room_for() -> None:
    scheduler = make_scheduler("a", "b", max_num_seqs=8)
    scheduler.update_worker("b", WorkerStatus(num_running=5, free_blocks=9000), 3.0)
    add(scheduler, 4, attempts=1)
    assert by_worker(scheduler.tick(3.0)) == {"b": 4}

    add(scheduler, 2)

    assert by_worker(scheduler.tick(3.0)) == {"a": 2}


def test_a_group_leaves_the_worker_that_fell_silent() -> None:
    scheduler = make_scheduler("a")
    add(scheduler, 1, GROUP, cost=GROUP_TOKENS + 1)
    assert by_worker(scheduler.tick(0.0)) == {"a": 1}
    scheduler.add_worker(make_info("b"), 3.0)
    add(scheduler, 3, GROUP, cost=GROUP_TOKENS + 1)

    assert by_worker(scheduler.tick(3.0)) == {"b": 3}


def test_a_requeued_job_goes_to_another_worker_than_the_one_that_lost_it() -> None:
    scheduler = make_scheduler("a", "b")
    scheduler.update_worker("b", WorkerStatus(num_running=20, free_blocks=9000), 0.0)
    job = replace(make_job(attempts=1), last_worker="a")
    scheduler.add_job(job)

    assert by_worker(scheduler.tick(0.0)) == {"b": 1}


def test_a_requeued_job_goes_back_to_its_worker_if_there_is_no_other() -> None:
    scheduler = make_scheduler("a")
    scheduler.add_job(replace(make_job(attempts=1), last_worker="a"))

    assert by_worker(scheduler.tick(0.0)) == {"a": 1}


def test_a_prompt_larger_than_a_whole_pool_goes_to_a_worker_that_can_hold_it() -> None:
    scheduler = make_scheduler("small", num_blocks=10)
    scheduler.add_worker(make_info("big", num_blocks=11), 0.0)
    scheduler.update_worker("big", WorkerStatus(num_running=1, free_blocks=5), 0.0)
    [large] = add(scheduler, 1, cost=161)
    assert scheduler.tick(0.0) == []
    add(scheduler, 2, cost=16)
    assert by_worker(scheduler.tick(0.0)) == {"small": 2}
    scheduler.update_worker("big", WorkerStatus(free_blocks=11), 0.0)

    assert [(d.job.job_id, d.worker_id) for d in scheduler.tick(0.0)] == [(large, "big")]


def test_a_prompt_that_fills_the_whole_pool_is_placed() -> None:
    scheduler = make_scheduler("a", num_blocks=10)
    add(scheduler, 1, cost=160)

    assert by_worker(scheduler.tick(0.0)) == {"a": 1}


def test_small_jobs_go_out_beside_a_great_many_that_no_worker_can_hold() -> None:
    scheduler = make_scheduler("a", num_blocks=10)
    add(scheduler, 2 * MAX_PER_TICK, cost=161)
    [small] = add(scheduler, 1, (9,), cost=16)
    given = job_ids(scheduler.tick(0.0))
    while scheduler.is_unfinished:
        given += job_ids(scheduler.tick(0.0))

    assert given == [small]


def test_a_job_that_no_worker_can_hold_is_hopeless_after_some_patience() -> None:
    scheduler = make_scheduler("a", num_blocks=10)
    [large] = add(scheduler, 1, cost=161)
    scheduler.tick(0.0)
    assert scheduler.find_hopeless(1.0, 5.0) == []
    assert scheduler.find_hopeless(5.9, 5.0) == []

    [(job, capacity)] = scheduler.find_hopeless(6.0, 5.0)

    assert (job.job_id, capacity) == (large, 160)


def test_the_patience_begins_when_the_last_worker_that_could_hold_the_job_is_gone() -> None:
    scheduler = make_scheduler("small", num_blocks=10)
    scheduler.add_worker(make_info("big", num_blocks=11), 0.0)
    scheduler.update_worker("big", WorkerStatus(num_running=1, free_blocks=1), 0.0)
    add(scheduler, 1, cost=161)
    scheduler.tick(0.0)
    assert scheduler.find_hopeless(50.0, 5.0) == []

    scheduler.remove_worker("big")
    scheduler.update_worker("small", WorkerStatus(free_blocks=10), 60.0)
    assert scheduler.tick(60.0) == []

    assert scheduler.find_hopeless(60.0, 5.0) == []
    assert len(scheduler.find_hopeless(65.0, 5.0)) == 1


def test_a_guess_at_the_length_of_a_prompt_is_no_reason_to_refuse_it() -> None:
    scheduler = make_scheduler("a", num_blocks=10)
    scheduler.add_job(replace(make_job(cost=161), is_estimated=True))

    assert by_worker(scheduler.tick(0.0)) == {"a": 1}


def test_a_large_job_can_be_taken_out() -> None:
    scheduler = make_scheduler("a", num_blocks=10)
    [large] = add(scheduler, 1, cost=161)
    scheduler.tick(0.0)

    scheduler.remove_job(large)

    assert scheduler.num_waiting == 0
    assert scheduler.find_hopeless(9.0, 0.0) == []


def test_work_is_runnable_while_all_its_workers_are_silent() -> None:
    scheduler = make_scheduler("a", "b", max_num_seqs=1)
    add(scheduler, 5)
    assert len(scheduler.tick(0.0)) == 4
    assert not scheduler.is_runnable(5.0)

    assert scheduler.is_runnable(5.1)

    scheduler.update_worker("a", WorkerStatus(num_running=1, free_blocks=10), 5.2)
    assert not scheduler.is_runnable(5.2)


def test_work_is_runnable_while_a_worker_idles() -> None:
    scheduler = make_scheduler("a", max_num_seqs=1)
    assert not scheduler.is_runnable(0.0)
    add(scheduler, 3)
    assert scheduler.is_runnable(0.0)

    scheduler.tick(0.0)

    assert scheduler.num_waiting == 1
    assert not scheduler.is_runnable(0.0)


@dataclass
class ModelWorker:
    """What a worker really holds: commands not read, prompts not computed, sequences running."""

    info: WorkerInfo
    unread: list[Dispatch] = field(default_factory=list)
    waiting: list[Dispatch] = field(default_factory=list)
    running: list[Dispatch] = field(default_factory=list)
    last_command: str = "0-0"

    @property
    def held(self) -> list[Dispatch]:
        return self.unread + self.waiting + self.running

    def check(self) -> None:
        # Interactive jobs and all others have credit of their own.
        for is_urgent in (False, True):
            ahead = [
                d.tokens for d in self.unread + self.waiting if (d.job.priority < 0) == is_urgent
            ]
            assert is_within_credit(ahead, self.info.max_num_batched_tokens)
        assert len(self.held) <= self.info.max_num_seqs + max(1, self.info.max_num_seqs // 8)

    def status(self, free_blocks: int) -> WorkerStatus:
        return WorkerStatus(
            last_command=self.last_command,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_tokens=sum(dispatch.tokens for dispatch in self.waiting),
            urgent_tokens=sum(d.tokens for d in self.waiting if d.job.priority < 0),
            free_blocks=free_blocks,
        )


class Play:
    """Drives a scheduler and model workers through random steps."""

    def __init__(self, limits: list[tuple[int, int]]) -> None:
        self.scheduler = Scheduler(silent_seconds=1e9)
        self.workers = {}
        for number, (max_num_seqs, budget) in enumerate(limits):
            name = f"w{number}"
            info = make_info(name, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
            self.workers[name] = ModelWorker(info)
            self.scheduler.add_worker(info, 0.0)
        self.finished: list[str] = []
        self._num_commands = 0

    def tick(self) -> None:
        for dispatch in self.scheduler.tick(0.0):
            self._num_commands += 1
            self.workers[dispatch.worker_id].unread.append(dispatch)
            self.scheduler.sent(dispatch, f"1-{self._num_commands}")
        prefixes = {d.job.key[:8] for worker in self.workers.values() for d in worker.held}
        waiting = map(self.scheduler.waiting_job, self.scheduler.waiting_ids)
        is_affine = all(job is not None and job.key[:8] in prefixes for job in waiting)
        for worker in self.workers.values():
            worker.check()
            assert worker.held or is_affine, "a worker idles beside jobs that none is at"

    def advance(self, number: int, num: int) -> None:
        """One worker reads, computes and finishes up to ``num`` jobs each, and tells so."""
        worker = list(self.workers.values())[number % len(self.workers)]
        done, worker.running = worker.running[:num], worker.running[num:]
        self.finished += job_ids(done)
        computed, worker.waiting = worker.waiting[:num], worker.waiting[num:]
        worker.running += computed
        # Commands are read all at once or not at all, so the last one read is the last written.
        if num:
            worker.waiting += worker.unread
            worker.unread = []
            worker.last_command = f"1-{self._num_commands}"
        self.scheduler.update_worker(worker.info.worker_id, worker.status(10_000), 0.0)


jobs = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(1, 900), st.integers(-1, 1)),
    max_size=30,
)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(64, 512)), min_size=1, max_size=4),
    st.lists(st.tuples(jobs, st.integers(0, 3), st.integers(0, 4)), max_size=12),
)
def test_credit_is_never_exceeded_nor_left_unused(
    limits: list[tuple[int, int]],
    script: list[tuple[list[tuple[list[int], int, int]], int, int]],
) -> None:
    play = Play(limits)
    submitted = []

    for arriving, number, num in script:
        for path, cost, priority in arriving:
            job = make_job(path, cost=cost, priority=priority)
            submitted.append(job.job_id)
            play.scheduler.add_job(job)
        play.tick()
        play.advance(number, num)
        play.tick()
    while len(play.finished) < len(submitted):
        for number in range(len(limits)):
            play.advance(number, 2)
        play.tick()

    assert sorted(play.finished) == sorted(submitted)
