"""Each baseline on cases so small that its published rule dictates the choice."""

from collections.abc import Callable
from typing import cast

import pytest

from support.waiting_jobs import Path, key_of, make_job
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import FinishedSequence, KvEvents, WorkerInfo, WorkerStatus
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.baselines.dynamo import DynamoStyle, LmetricStyle
from tidemill_scheduler.simulation.baselines.router import Router
from tidemill_scheduler.simulation.baselines.sglang import SglangStyle
from tidemill_scheduler.simulation.baselines.simple import PrefixHashRing, PullFifo, RoundRobin
from tidemill_scheduler.simulation.policies import POLICIES, make_policy
from tidemill_scheduler.simulation.status import SimFinished, SimStatus

#: Tokens of a step.  Routing hashes stand for 64 tokens, so a path of four fills a prompt of 256,
#: which is all that a worker has ahead.
BUDGET = 128
ALL_ROUTERS = (PullFifo, RoundRobin, PrefixHashRing, SglangStyle, DynamoStyle, LmetricStyle)


class Stage:
    """A router and its workers, whose statuses are written by hand."""

    def __init__(self, router: Router, num_workers: int = 2, *, budget: int = BUDGET) -> None:
        self.router = router
        self._num_sent = dict.fromkeys((f"w{n}" for n in range(num_workers)), 0)
        self._running: dict[str, list[str]] = {worker_id: [] for worker_id in self._num_sent}
        self._kv_seq = 0
        for worker_id in self._num_sent:
            info = WorkerInfo(
                worker_id=worker_id,
                model="m",
                block_size=16,
                num_blocks=10_000,
                max_num_seqs=256,
                max_num_batched_tokens=budget,
                wire_version=1,
            )
            router.add_worker(info, 0.0)

    def submit(self, *jobs: WaitingJob) -> list[tuple[str, str]]:
        """Add jobs and tick; returns who went where."""
        for job in jobs:
            self.router.add_job(job)
        return self.tick()

    def tick(self) -> list[tuple[str, str]]:
        sent = []
        for dispatch in self.router.tick(0.0):
            worker_id, job_id = dispatch.worker_id, dispatch.job.job_id
            self._num_sent[worker_id] += 1
            self._running[worker_id].append(job_id)
            self.router.sent(dispatch, f"1-{self._num_sent[worker_id]}")
            sent.append((job_id, worker_id))
        return sent

    def prefilled(self, worker_id: str, *finished: str) -> None:
        """Let a worker say that all prompts are computed, and that these jobs have ended."""
        running = [job_id for job_id in self._running[worker_id] if job_id not in finished]
        self._running[worker_id] = running
        ended = tuple(SimFinished(job_id, 0, 1) for job_id in finished)
        status = SimStatus(
            last_command=f"1-{self._num_sent[worker_id]}",
            num_running=len(running),
            num_waiting=0,
            waiting_tokens=0,
            free_blocks=9_000,
            step_seconds=0.0,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=0,
            finished=cast(tuple[FinishedSequence, ...], ended),
            step_cost=StepCost(),
        )
        self.router.update_worker(worker_id, cast(WorkerStatus, status), 0.0)

    def stores(self, worker_id: str, path: Path) -> None:
        """Let a worker say that a prefix is in its cache."""
        self._kv_seq += 1
        self.router.apply_kv(
            worker_id, KvEvents(seq=self._kv_seq, stored=key_of(path), evicted=b"")
        )

    def queue_of(self, worker_id: str) -> list[str]:
        """The jobs routed to a worker and not sent."""
        return [job.job_id for job in self.router.backends[worker_id].queue]


def prompt(job_id: str, path: Path = (), *, cost: int = 256) -> WaitingJob:
    return make_job(path, cost=cost, job_id=job_id)


def test_pull_fifo_keeps_jobs_in_one_queue_until_a_worker_has_room() -> None:
    stage = Stage(PullFifo())

    sent = stage.submit(prompt("a"), prompt("b"), prompt("c"), prompt("d"))
    assert sent == [("a", "w0"), ("b", "w1")]
    assert stage.queue_of("w0") == stage.queue_of("w1") == []

    # Whoever has room first takes the job that came first.
    stage.prefilled("w1")
    assert stage.tick() == [("c", "w1")]


def test_round_robin_goes_on_to_the_next_worker_however_busy_it_is() -> None:
    stage = Stage(RoundRobin())
    homes = dict(stage.submit(prompt("a"), prompt("b"), prompt("c"), prompt("d")))
    first, second = homes["a"], homes["b"]
    assert first != second
    assert stage.queue_of(first) == ["c"] and stage.queue_of(second) == ["d"]

    # Idle or not, a worker gets no job out of its turn.
    stage.prefilled(second, "b")
    assert stage.tick() == [("d", second)]
    stage.prefilled(second, "d")
    assert stage.tick() == []
    assert stage.queue_of(first) == ["c"]


def test_the_ring_keeps_prompts_together_that_begin_alike_for_256_tokens() -> None:
    stage = Stage(PrefixHashRing(), num_workers=8)

    def home_of(name: str, path: Path) -> str:
        [(_, worker_id)] = stage.submit(prompt(name, path))
        stage.prefilled(worker_id, name)
        return worker_id

    homes = [home_of(f"{group}", (group, 1, 1, 1, 1)) for group in range(12)]
    assert homes == [home_of(f"{group}", (group, 1, 1, 1, 2)) for group in range(12)]
    # A prompt that differs sooner is another one.
    assert homes != [home_of(f"{group}", (group, 1, 1, 2, 1)) for group in range(12)]


def test_the_ring_passes_a_worker_over_that_has_a_quarter_more_than_the_mean() -> None:
    stage = Stage(PrefixHashRing(), budget=100_000)
    homes = [stage.submit(prompt(f"job{n}", (1, 1, 1, 1)))[0][1] for n in range(6)]

    # The n-th job stays if n - 1 <= 1.25 x ((n - 1) / 2 + 1), which four jobs satisfy.
    assert homes[:4] == [homes[0]] * 4
    assert homes[4] != homes[0]


def test_sglang_style_follows_a_match_of_more_than_half_the_prompt() -> None:
    stage = Stage(SglangStyle(), budget=100_000)
    [(_, home)] = stage.submit(prompt("a", (1, 2, 3, 4)))

    assert stage.submit(prompt("b", (1, 2, 3, 9))) == [("b", home)]


def test_sglang_style_sends_half_a_match_to_the_smallest_tree() -> None:
    stage = Stage(SglangStyle(), budget=100_000)
    [(_, home)] = stage.submit(prompt("a", (1, 2, 3, 4)))

    [(_, target)] = stage.submit(prompt("b", (1, 2, 8, 9)))
    assert target != home


def test_sglang_style_prefers_the_shortest_queue_once_loads_differ_by_more_than_32() -> None:
    stage = Stage(SglangStyle(), budget=100_000)
    homes = [stage.submit(prompt(f"job{n}", (1, 2, 3, n + 10)))[0][1] for n in range(34)]

    assert homes[:33] == [homes[0]] * 33
    assert homes[33] != homes[0]


@pytest.mark.parametrize(("num_waiting", "expected"), [(128, "match"), (129, "job0")])
def test_sglang_style_takes_the_longest_match_first_in_queues_of_up_to_128(
    num_waiting: int, expected: str
) -> None:
    stage = Stage(SglangStyle(), num_workers=1)
    stage.submit(prompt("running", (1,)))
    stage.submit(*(prompt(f"job{n}", (2, n)) for n in range(num_waiting - 1)))
    stage.submit(prompt("match", (3, 4)))
    stage.stores("w0", (3, 4))
    assert len(stage.queue_of("w0")) == num_waiting

    stage.prefilled("w0")
    assert stage.tick()[0] == (expected, "w0")


def test_dynamo_style_credits_what_a_worker_has_in_its_cache() -> None:
    stage = Stage(DynamoStyle(), budget=1000)
    stage.stores("w1", (1, 2))

    assert stage.submit(prompt("a", (1, 2, 3, 4))) == [("a", "w1")]


@pytest.mark.parametrize(("cost", "expected"), [(30, "w1"), (34, "w0")])
def test_dynamo_style_weighs_prefill_ahead_against_an_overlap_of_128_tokens(
    cost: int, expected: str
) -> None:
    stage = Stage(DynamoStyle(), budget=1000)
    stage.stores("w1", (9, 1, 2))
    # It goes to its overlap. From then on it counts with what it computes and with what it holds:
    # cost + (64 + cost) tokens, against which a prompt saves 128.
    assert stage.submit(prompt("ahead", (9,), cost=64 + cost)) == [("ahead", "w1")]
    stage.stores("w1", (1, 2))

    assert stage.submit(prompt("a", (1, 2, 3, 4))) == [("a", expected)]


def test_dynamo_style_counts_what_decoding_requests_hold() -> None:
    stage = Stage(DynamoStyle(), budget=1000)
    stage.submit(prompt("decodes", cost=200))
    stage.prefilled("w0")
    stage.stores("w0", (1, 2))

    # 256 - 128 + 200 on w0 against 256 on w1.
    assert stage.submit(prompt("a", (1, 2, 3, 4))) == [("a", "w1")]
    stage.prefilled("w0", "decodes")
    stage.prefilled("w1", "a")
    assert stage.submit(prompt("b", (1, 2, 3, 4))) == [("b", "w0")]


def test_dynamo_style_holds_jobs_back_while_all_workers_have_four_steps_ahead() -> None:
    stage = Stage(DynamoStyle(), budget=100)
    stage.submit(*(prompt(f"job{n}", (n,), cost=150) for n in range(20)))

    backends = stage.router.backends.values()
    assert all(backend.prefill_tokens > 400 for backend in backends)
    # Three routed to each: the third found 300 tokens, a fourth would find 450.
    assert [backend.num_requests for backend in backends] == [3, 3]
    assert stage.router.num_waiting == 18

    stage.prefilled("w0")
    assert stage.tick()[0][1] == "w0"


def test_a_queued_job_counts_with_what_its_worker_must_compute() -> None:
    stage = Stage(DynamoStyle(), num_workers=1, budget=180)
    stage.stores("w0", (1, 2))
    stage.submit(prompt("running", (9,), cost=250), prompt("a", (1, 2, 3, 4), cost=256))

    assert stage.queue_of("w0") == ["a"]
    assert stage.router.backends["w0"].queued_tokens == 256 - 128
    stage.router.forget("a")
    assert stage.router.backends["w0"].queued_tokens == 0


@pytest.mark.parametrize(("num_running", "expected"), [(1, "w0"), (2, "w1")])
def test_lmetric_style_multiplies_new_tokens_by_the_batch(num_running: int, expected: str) -> None:
    stage = Stage(LmetricStyle(), budget=1000)
    stage.stores("w0", (7,))
    for number in range(num_running):
        # One token of each is new on w0, and they decode there.
        assert stage.submit(prompt(f"job{number}", (7,), cost=65)) == [(f"job{number}", "w0")]
        stage.prefilled("w0")
    stage.stores("w0", (1, 2))

    # 100 new tokens x (1 + running) on w0 against 228 x 1 on w1.
    assert stage.submit(prompt("a", (1, 2, 3), cost=228)) == [("a", expected)]


@pytest.mark.parametrize("make_router", ALL_ROUTERS)
def test_what_waited_for_a_worker_that_is_gone_is_routed_anew(
    make_router: Callable[[], Router],
) -> None:
    stage = Stage(make_router())
    stage.submit(*(prompt(f"job{n}", (n,)) for n in range(8)))
    num_sent = 8 - stage.router.num_waiting

    stage.router.remove_worker("w0")
    sent = []
    while stage.router.num_waiting:
        stage.prefilled("w1")
        found = stage.tick()
        assert found, "jobs lie although the worker has room"
        sent += found
    assert len({job_id for job_id, _ in sent}) == len(sent) == 8 - num_sent
    assert {worker_id for _, worker_id in sent} == {"w1"}


@pytest.mark.parametrize("make_router", ALL_ROUTERS)
def test_a_forgotten_job_is_never_sent(make_router: Callable[[], Router]) -> None:
    stage = Stage(make_router(), num_workers=1)
    stage.submit(*(prompt(f"job{n}", (n,)) for n in range(4)))
    assert stage.router.num_waiting == 3

    assert stage.router.forget("job2")
    assert not stage.router.forget("job2")
    stage.prefilled("w0", "job0")
    sent = stage.tick()
    stage.prefilled("w0", "job1")
    sent += stage.tick()
    assert [job_id for job_id, _ in sent] == ["job1", "job3"]
    assert stage.router.num_waiting == 0


def test_policies_are_made_by_name_and_an_unknown_one_is_refused() -> None:
    for name in POLICIES:
        assert make_policy(name).is_unfinished is False
    with pytest.raises(InvalidRequest, match="there is no 'random'"):
        make_policy("random")
