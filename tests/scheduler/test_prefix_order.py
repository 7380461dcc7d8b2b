"""The order of waiting jobs, checked against a trie and against its promises."""

from dataclasses import dataclass, field
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from support.waiting_jobs import key_of, make_job
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.prefix_order import GROUP_DEPTH, PrefixOrder, shared_depth

paths = st.lists(st.integers(0, 2), max_size=5).map(tuple)
many_paths = st.lists(paths, max_size=60)
WORKERS = ("a", "b", "c")


@dataclass
class TrieNode:
    """A node of a radix tree that stores its jobs in order of arrival."""

    jobs: list[str] = field(default_factory=list)
    children: dict[bytes, "TrieNode"] = field(default_factory=dict)

    def insert(self, key: bytes, job_id: str) -> None:
        node = self
        for start in range(0, len(key), ROUTING_HASH_BYTES):
            label = key[start : start + ROUTING_HASH_BYTES]
            node = node.children.setdefault(label, TrieNode())
        node.jobs.append(job_id)

    def walk(self) -> list[str]:
        below = [job for label in sorted(self.children) for job in self.children[label].walk()]
        return self.jobs + below


def new_order() -> tuple[PrefixOrder, dict[str, bytes]]:
    anchors: dict[str, bytes] = {}
    return PrefixOrder(anchors), anchors


def pop(
    order: PrefixOrder, anchors: dict[str, bytes], worker: str, *, yields: bool = True
) -> WaitingJob | None:
    job = order.peek(worker)
    if job is None and order.claim_range(worker, lambda owner: yields):
        job = order.peek(worker)
    if job is not None:
        order.remove(job.job_id)
        anchors[worker] = job.key
    return job


def group_of(job: WaitingJob) -> bytes:
    """What a job shares with its group; a job with a shorter key is a group of its own."""
    size = GROUP_DEPTH * ROUTING_HASH_BYTES
    return job.key[:size] if len(job.key) >= size else job.job_id.encode()


def num_runs(jobs: list[WaitingJob]) -> int:
    return len(list(groupby(jobs, key=group_of)))


@given(many_paths)
def test_one_worker_walks_the_radix_tree_depth_first(all_paths: list[tuple[int, ...]]) -> None:
    order, anchors = new_order()
    trie = TrieNode()
    for path in all_paths:
        job = make_job(path)
        order.add(job)
        trie.insert(job.key, job.job_id)

    walked = [job.job_id for _ in all_paths if (job := pop(order, anchors, "a"))]

    assert walked == trie.walk()
    assert len(order) == 0


@given(paths, paths)
def test_shared_depth_counts_the_labels_that_two_paths_share(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    same = [a == b for a, b in zip(left, right, strict=False)]
    expected = [*same, False].index(False)

    assert shared_depth(key_of(left), key_of(right)) == expected


@given(many_paths, st.lists(st.sampled_from(WORKERS), min_size=1, max_size=20))
def test_workers_together_get_every_job_once(
    all_paths: list[tuple[int, ...]], turns: list[str]
) -> None:
    order, anchors = new_order()
    jobs = [make_job(path) for path in all_paths]
    for job in jobs:
        order.add(job)

    got = [
        job.job_id
        for turn in range(len(jobs))
        if (job := pop(order, anchors, turns[turn % len(turns)]))
    ]

    assert sorted(got) == sorted(job.job_id for job in jobs)


@given(many_paths, st.lists(st.sampled_from(WORKERS), min_size=1, max_size=20))
def test_a_group_stays_in_one_piece_on_one_worker_whose_owner_does_not_yield(
    all_paths: list[tuple[int, ...]], turns: list[str]
) -> None:
    order, anchors = new_order()
    for path in all_paths:
        order.add(make_job(path))
    served: dict[str, list[WaitingJob]] = {worker: [] for worker in WORKERS}

    # A worker that finds nothing steps aside; the one that has the group goes on.
    turn = 0
    while len(order):
        worker = (*turns, *WORKERS)[turn % (len(turns) + len(WORKERS))]
        if job := pop(order, anchors, worker, yields=False):
            served[worker].append(job)
        turn += 1

    groups = {group_of(job) for jobs in served.values() for job in jobs}
    assert sum(num_runs(jobs) for jobs in served.values()) == len(groups)


@given(many_paths, st.lists(st.sampled_from(WORKERS), min_size=1, max_size=20))
def test_each_stolen_range_costs_at_most_one_more_run_of_a_group(
    all_paths: list[tuple[int, ...]], turns: list[str]
) -> None:
    order, anchors = new_order()
    for path in all_paths:
        order.add(make_job(path))
    served: dict[str, list[WaitingJob]] = {worker: [] for worker in WORKERS}
    num_claims = 0

    for turn in range(len(order)):
        worker = turns[turn % len(turns)]
        num_claims += order.peek(worker) is None
        job = pop(order, anchors, worker)
        assert job is not None
        served[worker].append(job)

    groups = {group_of(job) for jobs in served.values() for job in jobs}
    assert sum(num_runs(jobs) for jobs in served.values()) <= len(groups) + num_claims


@dataclass
class Arrival:
    """What the order looked like when a job arrived."""

    epoch: int
    work_before: int


steps = st.lists(
    st.tuples(
        st.sampled_from(WORKERS),
        st.lists(st.tuples(st.booleans(), paths, st.integers(1, 400)), max_size=4),
    ),
    max_size=40,
)


@given(many_paths, steps)
def test_nobody_waits_longer_than_two_epochs_whatever_arrives(
    all_paths: list[tuple[int, ...]],
    script: list[tuple[str, list[tuple[bool, tuple[int, ...], int]]]],
) -> None:
    order, anchors = new_order()
    arrivals: dict[str, Arrival] = {}
    costs: dict[str, int] = {}
    began_with: dict[int, int] = {0: 0}
    done = 0

    def arrive(job: WaitingJob) -> None:
        arrivals[job.job_id] = Arrival(order.epoch, done)
        costs[job.job_id] = job.cost
        order.add(job)

    def serve(worker: str) -> None:
        nonlocal done
        waiting = sum(costs.values())
        job = pop(order, anchors, worker)
        if job is None:
            return
        # The epoch began with this very call, so all that waited was its work.
        began_with.setdefault(order.epoch, waiting)
        arrival = arrivals.pop(job.job_id)
        assert order.epoch <= arrival.epoch + 1
        bound = 1.25 * (began_with[arrival.epoch] + began_with.get(arrival.epoch + 1, 0))
        assert done - arrival.work_before + job.cost <= bound
        done += costs.pop(job.job_id)

    for path in all_paths:
        arrive(make_job(path))
    for worker, newcomers in script:
        serve(worker)
        for pushes_in, path, cost in newcomers:
            # The adversary extends what the worker is at, which may join the running epoch.
            job = make_job(path, cost=cost)
            if pushes_in and worker in anchors:
                job = WaitingJob(
                    job.job_id, job.queue, job.entry_id, "m", anchors[worker] + job.key, cost
                )
            arrive(job)
    while len(order):
        serve("a")

    assert not arrivals


def test_a_job_that_extends_the_current_group_joins_the_epoch() -> None:
    order, anchors = new_order()
    for path in ((1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)):
        order.add(make_job(path))
    first = pop(order, anchors, "a")
    assert first is not None
    group = next(path for path in ((1, 1), (2, 2)) if key_of(path) == first.key[:16])

    joins, waits = make_job((*group, 7), cost=50), make_job((9, 9, 9), cost=50)
    order.add(joins)
    order.add(waits)

    served = [job.job_id for _ in range(5) if (job := pop(order, anchors, "a"))]
    assert joins.job_id in served[:2]
    assert served[-1] == waits.job_id


def test_joiners_take_a_quarter_of_the_epochs_work_at_most() -> None:
    order, anchors = new_order()
    for _ in range(8):
        order.add(make_job((1, 1), cost=100))
    pop(order, anchors, "a")

    for _ in range(20):
        order.add(make_job((1, 1), cost=100))

    served = 0
    while order.epoch == 1 and pop(order, anchors, "a"):
        served += order.epoch == 1
    assert served == 7 + 2


def test_a_removed_job_is_not_served() -> None:
    order, anchors = new_order()
    current, upcoming = [make_job((1,)) for _ in range(3)], [make_job((2,)) for _ in range(3)]
    for job in current:
        order.add(job)
    pop(order, anchors, "a")
    for job in upcoming:
        order.add(job)

    order.remove(current[1].job_id)
    order.remove(upcoming[1].job_id)

    rest = [job.job_id for _ in range(4) if (job := pop(order, anchors, "a"))]
    assert rest == [current[2].job_id, upcoming[0].job_id, upcoming[2].job_id]


def test_the_range_of_a_released_worker_is_taken_over_whole() -> None:
    order, anchors = new_order()
    for _ in range(6):
        order.add(make_job((1, 1, 1)))
    pop(order, anchors, "a")

    order.release("a")
    del anchors["a"]

    assert sum(pop(order, anchors, "b", yields=False) is not None for _ in range(6)) == 5


def test_a_new_epoch_begins_for_each_worker_where_it_is() -> None:
    order, anchors = new_order()
    for label in range(6):
        order.add(make_job((label, label)))
    for _ in range(3):
        pop(order, anchors, "a")
        pop(order, anchors, "b")
    followers = {
        worker: WaitingJob("f" + worker, "p1:d", "9-9", "m", anchors[worker], 10)
        for worker in ("a", "b")
    }

    for follower in followers.values():
        order.add(follower)

    for worker, follower in followers.items():
        assert pop(order, anchors, worker, yields=False) == follower
