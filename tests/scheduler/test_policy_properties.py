"""What the whole scheduler promises, whatever comes in which order."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.played_shard import TOKENS, PlayedShard, salted_job
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.routing_hashes import shared_depth
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings
from tidemill_scheduler.policy.tenant_queue import PICKS_PER_TURN

#: Small turns, so that many go by; all classes but the first are put in prefix order.
QUANTUM = 512
CLASS_QUANTUM = 256
POLICY = PolicySettings(
    scan_seconds=(float("inf"), 0.0, 0.0), tenant_quantum=QUANTUM, class_quantum=CLASS_QUANTUM
)
#: Tenants that come new may have so many turns ahead of the rotation, see ``DeficitRoundRobin``.
NUM_AHEAD = 16


def work_of(jobs: Iterable[WaitingJob]) -> int:
    """Tokens to be computed for some jobs' prompts, each shared prefix once."""
    work, last = 0, b""
    for job in sorted(jobs, key=lambda job: job.sort_key):
        work += max(1, job.cost - TOKENS * shared_depth(last, job.key))
        last = job.key
    return work


class Adversary:
    """Sees what goes out, and adds jobs so that a victim goes out as late as possible.

    All have priorities 0 and 1 (and -1 in the first class), so that nobody ages.  Whenever a job of
    tenant 0 went out another one comes, which extends its prompt or begins another.  The other
    tenants of the class always have jobs, and new ones come all the time; so it is with the other
    classes.
    """

    def __init__(self, *, rank: int, num_workers: int, num_rivals: int, longest: int) -> None:
        self.shard = PlayedShard(Scheduler(silent_seconds=1e9, age_seconds=1e9, settings=POLICY))
        for _ in range(num_workers):
            self.shard.join(max_num_seqs=1, max_num_batched_tokens=512)
        self.rank, self.num_rivals, self.longest = rank, num_rivals, longest
        self.paths: dict[str, tuple[int, ...]] = {}
        self.largest = 0
        self._number = 0

    @property
    def num_tenants(self) -> int:
        """Tenants of the victim's class that have jobs."""
        return len({j.tenant for j in self.shard.waiting.values() if j.priority_class == self.rank})

    def own(self) -> list[WaitingJob]:
        """Tenant 0's jobs that wait in the victim's class."""
        jobs = self.shard.waiting.values()
        return [j for j in jobs if j.tenant == "t0" and j.priority_class == self.rank]

    def add(self, tenant: int, path: tuple[int, ...], rank: int | None = None) -> WaitingJob:
        """Another job, none like the ones before."""
        self._number += 1
        extra = 1 + 61 * self._number % self.longest
        rank = self.rank if rank is None else rank
        job = salted_job(tenant, path, extra, priority=rank - 1, since=self.shard.now)
        self.largest = max(self.largest, job.cost + POLICY.output_weight)
        self.paths[job.job_id] = path
        self.shard.add(job)
        return job

    def crowd(self) -> None:
        """See that nobody but tenant 0 runs out of jobs."""
        waiting = Counter((j.priority_class, j.tenant) for j in self.shard.waiting.values())
        for rank in range(3):
            for tenant in range(1, 1 + self.num_rivals):
                for _ in range(3 - waiting[rank, f"t{tenant}"]):
                    self.add(tenant, (self._number,), rank)
        if self.num_tenants < 2 + 2 * self.num_rivals:
            self.add(1000 + self._number, ())

    def turn(self) -> list[Dispatch]:
        """Let jobs out and end them."""
        self.crowd()
        dispatches = self.shard.tick()
        self.shard.now += 0.01
        for worker in self.shard.workers.values():
            self.shard.finish_all(worker)
        return dispatches


@settings(max_examples=40)
@given(
    rank=st.integers(1, 2),
    num_workers=st.integers(1, 3),
    num_rivals=st.integers(0, 5),
    longest=st.sampled_from([60, 300]),
    num_own=st.integers(1, 16),
    extends=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_no_job_of_the_batch_lane_waits_beyond_its_bound_whatever_an_adversary_adds(
    rank: int,
    num_workers: int,
    num_rivals: int,
    longest: int,
    num_own: int,
    extends: list[bool],
) -> None:
    """The bound, in prompt tokens that are dispatched after a job came and before it goes out.

    Of its own tenant at its own priority, shared prefixes counted once:

        A <= 1.25 * (W_e + W_e+1)

    with W_e the work that waited when the epoch began in which it came, W_e+1 when the next one
    began.  Let p be what goes out of that, each time it is computed and with what outputs count;
    m the largest job, s the workers, n the tenants of the class and q a tenant's turn, all of
    weight 1.  The tenant needs (p + m) / q + 2 turns.  Between two of them each other tenant has
    one, and newcomers as many together, 16 of them in advance; so of the class go out

        C <= (2 * n * ((p + m) / q + 2) + 16 + s) * (q + m)

    and, with class weights w of 8 : 4 : 1 and a class's turn of w * Q, of all classes

        T <= ((C + m) / (w * Q) + 2) * (13 * Q + 3 * m) + (s + 1) * (8 * Q + m).
    """
    adversary = Adversary(
        rank=rank, num_workers=num_workers, num_rivals=num_rivals, longest=longest
    )
    at = [adversary.add(0, (number % 3, number)) for number in range(num_own)]
    first_work = most_work = work_of(at)
    adversary.turn()
    victim = adversary.add(0, (9, 9))
    bounds = Bounds(rank, num_workers)
    before: list[Dispatch] = []
    labels, turns = itertools.count(100), itertools.cycle(extends)

    while victim.job_id in adversary.shard.waiting:
        while len(adversary.own()) <= num_own:
            path = adversary.paths[at[-1].job_id][:6]
            adversary.add(0, (*path, next(labels)) if next(turns) else (next(labels), 1))
        most_work = max(most_work, work_of(adversary.own()))
        bounds.num_tenants = max(bounds.num_tenants, adversary.num_tenants)
        bounds.largest = adversary.largest
        dispatches = adversary.turn()
        gone = [dispatch.job for dispatch in dispatches]
        before += dispatches[: gone.index(victim)] if victim in gone else dispatches

        own = [d for d in before if d.job.tenant == "t0" and d.job.priority_class == rank]
        of_class = [d for d in before if d.job.priority_class == rank]
        at += [dispatch.job for dispatch in own[-1:]]
        assert work_of(d.job for d in own) <= 1.25 * (first_work + most_work)
        assert price_of(of_class) <= bounds.of_class(price_of(own))
        assert price_of(before) <= bounds.of_all(price_of(own))


def price_of(dispatches: Iterable[Dispatch]) -> float:
    """What some dispatches count: prompt tokens to compute, and one output token each."""
    return sum(dispatch.tokens + POLICY.output_weight for dispatch in dispatches)


@dataclass
class Bounds:
    """How much goes out before the victim, see the test."""

    rank: int
    num_workers: int
    num_tenants: int = 0
    largest: int = 0

    def of_class(self, own_price: float) -> float:
        """Of the victim's class, when so much of its tenant goes before it."""
        num_turns = (own_price + self.largest) / QUANTUM + 2
        in_advance = NUM_AHEAD + self.num_workers
        return (2 * self.num_tenants * num_turns + in_advance) * (QUANTUM + self.largest)

    def of_all(self, own_price: float) -> float:
        """Of all classes."""
        weight = POLICY.class_weights[self.rank]
        total = sum(POLICY.class_weights) * CLASS_QUANTUM
        rounds = (self.of_class(own_price) + self.largest) / (CLASS_QUANTUM * weight) + 2
        in_advance = (self.num_workers + 1) * (8 * CLASS_QUANTUM + self.largest)
        return rounds * (total + 3 * self.largest) + in_advance


@settings(max_examples=60)
@given(
    num_workers=st.integers(1, 3),
    num_before=st.integers(0, 12),
    num_added=st.integers(1, 4),
    cost=st.integers(64, 500),
)
def test_no_interactive_job_waits_beyond_its_bound_whatever_comes_after_it(
    num_workers: int, num_before: int, num_added: int, cost: int
) -> None:
    """At place p of those that wait, a job is gone after ``16 * p`` picks of its worker.

    Later ones are shorter, and each has what its worker holds, so that their response ratios are
    higher.
    """
    shard = PlayedShard(Scheduler(silent_seconds=1e9))
    for _ in range(num_workers):
        shard.join(max_num_seqs=1, max_num_batched_tokens=64)
    for number in range(num_before):
        shard.add(salted_job(0, (number,), cost, priority=-1))
    victim = salted_job(0, (99,), cost, priority=-1)
    shard.add(victim)
    place = len(shard.waiting)
    picks = Counter[str]()
    taker = ""
    for _ in range(PICKS_PER_TURN * place * num_workers + 1):
        for _new in range(num_workers * num_added + 2):
            shard.add(salted_job(0, (), 1, priority=-1, since=shard.now))
        for dispatch in shard.tick():
            if not taker:
                picks[dispatch.worker_id] += 1
            if dispatch.job is victim:
                taker = dispatch.worker_id
        if taker:
            break
        shard.now += 1e-4
        for worker in shard.workers.values():
            shard.finish_all(worker)

    assert taker, "it waits for ever"
    assert picks[taker] <= PICKS_PER_TURN * place


#: So many hashes are the prefix of a group of followers.
SHARED_HASHES = 3


class Mirror:
    """What a worker can take, by the tests' own account of what it was given and told."""

    def __init__(self, shard: PlayedShard) -> None:
        self.workers = {name: Worker(w.info, 0.0) for name, w in shard.workers.items()}

    def has_room(self, name: str, dispatch: Dispatch) -> bool:
        """Whether a worker that has a job's prefix could take it at once."""
        tokens = dispatch.job.cost - SHARED_HASHES * TOKENS
        return self.workers[name].has_credit and self.workers[name].fits(dispatch.job, tokens)

    def is_crowded(self, name: str, other: str) -> bool:
        """Whether a worker has so many more sequences that the other one all but idles."""
        ours, theirs = self.workers[name], self.workers[other]
        return ours.num_seqs - theirs.num_seqs >= ours.seq_slack


@settings(max_examples=150)
@given(
    limits=st.lists(st.tuples(st.integers(1, 12), st.integers(64, 1024)), min_size=2, max_size=4),
    groups=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=25),
    own_tokens=st.integers(1, 200),
)
def test_followers_go_elsewhere_while_a_prefix_is_computed_only_to_save_a_worker_from_idling(
    limits: list[tuple[int, int]],
    groups: list[int],
    moves: list[tuple[int, int]],
    own_tokens: int,
) -> None:
    """The work is below what an epoch shares out at its beginning; only thieves split a group."""
    shard = PlayedShard(Scheduler(silent_seconds=1e9, settings=POLICY))
    for max_num_seqs, budget in limits:
        shard.join(tells_cache=True, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    for label, size in enumerate(groups):
        for number in range(size):
            job = salted_job(0, (label, label, number), own_tokens, priority=1)
            shard.add(job)
    mirror = Mirror(shard)
    num_commands = 0
    #: Where each group's prefix is computed or was.
    homes: dict[bytes, set[str]] = {}
    splits = Counter[bytes]()

    def play() -> None:
        nonlocal num_commands
        for dispatch in shard.tick():
            prefix = dispatch.job.key[: SHARED_HASHES * ROUTING_HASH_BYTES]
            taker = dispatch.worker_id
            there = homes.setdefault(prefix, set())
            warm = any(prefix[-8:] in shard.workers[name].cached for name in there)
            is_hungry = any(
                not mirror.has_room(name, dispatch) or mirror.is_crowded(name, taker)
                for name in shard.workers
                if name != taker
            )
            if there and taker not in there and not warm and not is_hungry:
                # The other half of what a hungry one took belongs to a worker that comes to it now.
                splits[prefix] -= 1
                assert splits[prefix] >= 0
            splits[prefix] += is_hungry
            there.add(taker)
            num_commands += 1
            mirror.workers[taker].reserve(dispatch.job.job_id, dispatch.tokens)
            mirror.workers[taker].sent(dispatch.job.job_id, f"1-{num_commands}")

    play()
    for number, num in [*moves, *((n, 99) for _ in range(99) for n in range(len(limits)))]:
        if not shard.waiting:
            break
        worker = list(shard.workers.values())[number % len(limits)]
        shard.end(worker, num)
        shard.compute(worker, num)
        shard.read(worker)
        status = worker.status()
        mirror.workers[worker.info.worker_id].update(status, shard.now)
        shard.scheduler.update_worker(worker.info.worker_id, status, shard.now)
        play()
    assert not shard.waiting


@settings(max_examples=100)
@given(
    num_workers=st.integers(1, 3),
    order=st.permutations(range(12)),
    num_kept=st.integers(0, 12),
    computes=st.booleans(),
    tells_cache=st.booleans(),
)
def test_what_a_dead_worker_held_goes_out_first_in_prefix_order_and_is_computed_anew(
    num_workers: int, order: list[int], num_kept: int, computes: bool, tells_cache: bool
) -> None:
    shard = PlayedShard(Scheduler(silent_seconds=1e9, settings=POLICY))
    dying = shard.join(tells_cache=tells_cache)
    for number in order:
        shard.add(salted_job(0, (number % 3, number % 2, number), priority=number % 3 - 1))
    assert len(shard.tick()) == len(order)
    if computes:
        shard.read(dying)
        shard.compute(dying, len(order))
        shard.end(dying, num_kept)
        shard.tell(dying)
    others = [shard.join(tells_cache=tells_cache) for _ in range(num_workers)]
    for priority in (-1, 0, 1):
        shard.add(salted_job(1, (priority + 1,), priority=priority))
    returned = {job.job_id for job in shard.die(dying)}
    shard.workers = {worker.info.worker_id: worker for worker in others}

    dispatches = shard.tick()
    shard.check()

    assert [d.job.job_id in returned for d in dispatches[:1]] == [bool(returned)]
    for worker in others:
        own = [d for d in dispatches if d.worker_id == worker.info.worker_id]
        assert not own or own[0].tokens == own[0].job.cost, "nobody has anything of it"
    if num_workers == 1:
        # Several share it out; one that cannot have a part without computing a prefix again
        # takes other jobs.
        first = [dispatch.job for dispatch in dispatches[: len(returned)]]
        assert {job.job_id for job in first} == returned
        assert first == sorted(first, key=lambda job: job.sort_key)


@pytest.mark.parametrize("tells_cache", [False, True])
def test_a_worker_that_comes_back_under_its_name_has_nothing(tells_cache: bool) -> None:
    shard = PlayedShard()
    worker = shard.join(tells_cache=tells_cache)
    tokens = []
    for _ in range(2):
        shard.add(salted_job(0, (1, 2)))
        [dispatch] = shard.tick()
        tokens.append(dispatch.tokens)
        shard.finish_all(worker)

    assert shard.die(worker) == []
    shard.scheduler.add_worker(worker.info, shard.now)
    shard.workers[worker.info.worker_id] = worker
    shard.add(salted_job(0, (1, 2)))
    [dispatch] = shard.tick()

    assert tokens == [dispatch.job.cost, dispatch.job.cost - 3 * TOKENS]
    assert dispatch.tokens == dispatch.job.cost
