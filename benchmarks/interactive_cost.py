"""What the interactive lane and the residency index cost the daemon, in microseconds.

``make bench-lane`` prints a table (``ARGS="1000 100000"``: jobs that wait).
"""

import random
import sys
from collections.abc import Callable, Sequence
from time import process_time

from tidemill.protocol.messages import KvEvents
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.interactive_lane import InteractiveLane
from tidemill_scheduler.policy.residency import Residency

NUM_WORKERS = 1000
TOKENS_PER_HASH = 64
NUM_PREFIXES = 2000
PREFIX_HASHES = 20
NUM_TENANTS = 8


class SteadyLoads:
    """Workers that are all alike and equally busy."""

    def __init__(self, num_workers: int) -> None:
        self._ids = dict.fromkeys(f"w{number}" for number in range(num_workers))
        self._cost = StepCost()

    def ids(self) -> dict[str, None]:
        """All workers, in order."""
        return self._ids

    def busy_seconds(self, worker_id: str) -> float:
        """As in ``WorkerLoads``."""
        return 0.25

    def decode_load(self, worker_id: str) -> float:
        """As in ``WorkerLoads``."""
        return 0.5

    def cost(self, worker_id: str) -> StepCost:
        """As in ``WorkerLoads``."""
        return self._cost

    def can_hold(self, worker_id: str, job: WaitingJob) -> bool:
        """As in ``WorkerLoads``."""
        return True


def interactive_costs(sizes: Sequence[int] = (1_000, 100_000)) -> dict[str, float]:
    """Measure everything once; microseconds by what they were spent on."""
    figures = {
        "store, per digest": _store_cost(),
        "depth of 100 hashes": _depth_cost(),
        "holders of 100 hashes": _holders_cost(),
        "dispatch and arrival of 25 hashes": _shadow_cost(),
    }
    for num_workers in (8, NUM_WORKERS):
        for size in sizes:
            figures |= _lane_costs(size, num_workers)
    return figures


def _lane_costs(size: int, num_workers: int) -> dict[str, float]:
    rng = random.Random(1)
    residency, loads = Residency(TOKENS_PER_HASH), SteadyLoads(num_workers)
    for worker_id in loads.ids():
        residency.add_worker(worker_id, 10_000)
        residency.reset(worker_id, 0, b"")
    lane = InteractiveLane(residency, loads)
    jobs = _make_jobs(rng, size + 1000)
    for number, job in enumerate(jobs[:size]):
        lane.add(job, number / size)
    bind = _time(lambda: [lane.add(job, 1.0) for job in jobs[size:]], 1000)
    pick = _time(lambda: _pick(lane, residency, loads, 1000), 1000)
    steal = _time(lambda: [lane.steal(worker_id, 2.0) for worker_id in _some(loads, 100)], 100)
    name = f"{size} queued, {num_workers} workers"
    return {f"bind, {name}": bind, f"pick, {name}": pick, f"steal, {name}": steal}


def _pick(lane: InteractiveLane, residency: Residency, loads: SteadyLoads, count: int) -> None:
    workers = [worker_id for worker_id in loads.ids() if lane.tenants(worker_id)]
    for number in range(count):
        worker_id = workers[number % len(workers)]
        tenant = next(iter(lane.tenants(worker_id)), None)
        job = None if tenant is None else lane.peek(worker_id, tenant, 2.0)
        if job is not None:
            residency.dispatched(worker_id, job.kv_key)
            lane.take(job, worker_id, 2.0)


def _make_jobs(rng: random.Random, count: int) -> list[WaitingJob]:
    prefixes = [_key(rng, PREFIX_HASHES) for _ in range(NUM_PREFIXES)]
    jobs = []
    for number in range(count):
        prefix = rng.randrange(NUM_PREFIXES)
        suffix = rng.randrange(1, 16)
        jobs.append(
            WaitingJob(
                job_id=f"j{number}",
                queue=f"p0:t{prefix % NUM_TENANTS}",
                entry_id=f"1-{number}",
                model="m",
                key=prefixes[prefix] + _key(rng, suffix),
                cost=TOKENS_PER_HASH * (PREFIX_HASHES + suffix) + 9,
                since=number / count,
            )
        )
    return jobs


def _store_cost() -> float:
    rng = random.Random(2)
    residency = Residency(TOKENS_PER_HASH)
    batches = []
    for number in range(NUM_WORKERS):
        residency.add_worker(f"w{number}", 10_000)
        shared = _key(random.Random(3), 20)
        batches.append(KvEvents(seq=1, stored=shared + _key(rng, 180)))
    apply = lambda: [residency.apply(f"w{n}", batch) for n, batch in enumerate(batches)]  # noqa: E731
    return _time(apply, 200 * NUM_WORKERS)


def _depth_cost() -> float:
    residency, keys = _filled()
    return _time(lambda: [residency.depth("w0", key) for key in keys * 10], 10 * len(keys))


def _holders_cost() -> float:
    residency, keys = _filled()
    return _time(lambda: [residency.holders(key, 1) for key in keys * 10], 10 * len(keys))


def _filled() -> tuple[Residency, list[bytes]]:
    rng = random.Random(4)
    residency = Residency(TOKENS_PER_HASH)
    keys = [_key(rng, 100) for _ in range(200)]
    for number in range(NUM_WORKERS):
        residency.add_worker(f"w{number}", 10_000)
        held = [key[: 8 * rng.randrange(101)] for key in (keys if number < 1 else keys[:20])]
        residency.reset(f"w{number}", 0, b"".join(held))
    return residency, keys


def _shadow_cost() -> float:
    rng = random.Random(5)
    residency = Residency(TOKENS_PER_HASH)
    residency.add_worker("w", 10_000)
    residency.reset("w", 0, b"")
    keys = [_key(rng, 25) for _ in range(2000)]

    def run() -> None:
        for key in keys:
            residency.dispatched("w", key)
            residency.arrived("w", key)

    return _time(run, len(keys))


def _key(rng: random.Random, num_hashes: int) -> bytes:
    return rng.randbytes(ROUTING_HASH_BYTES * num_hashes)


def _some(loads: SteadyLoads, count: int) -> list[str]:
    ids = list(loads.ids())
    return [ids[number % len(ids)] for number in range(count)]


def _time(run: Callable[[], object], count: int) -> float:
    """Microseconds of processor time for each of ``count`` things that one run does."""
    began = process_time()
    run()
    return (process_time() - began) / count * 1e6


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]] or [1_000, 100_000]
    for name, microseconds in interactive_costs(sizes).items():
        print(f"{microseconds:10.2f} us  {name}")


if __name__ == "__main__":
    main()
