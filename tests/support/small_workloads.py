"""Workloads small enough to check by hand."""

import random

from tidemill_scheduler.simulation.workload import Table, Workload


def make_workload(
    jobs: list[tuple[list[int], int, int]], *, tokens_per_hash: int = 4, interval: float = 0.0
) -> Workload:
    """Make a workload of (hash ids, input tokens, output tokens), one each ``interval`` seconds."""
    table = Table()
    for number, (ids, input_tokens, output_tokens) in enumerate(jobs):
        table.append(ids, (input_tokens, output_tokens), number * interval)
    return Workload("small", table, tokens_per_hash)


def make_random_workload(
    seed: int, num_jobs: int = 200, *, interval: float = 0.0, tenants: int = 1
) -> Workload:
    """Make jobs that share prefixes of several depths; 64 tokens for each hash."""
    rng = random.Random(seed)
    table = Table(tenant_names=[f"tenant{number}" for number in range(tenants)])
    ids_of: dict[tuple[int, ...], int] = {}
    for number in range(num_jobs):
        path = [rng.randrange(4) for _ in range(rng.randint(1, 6))] + [number + 10] * 3
        depths = range(1, rng.randint(1, len(path)) + 1)
        ids = [ids_of.setdefault(tuple(path[:depth]), len(ids_of)) for depth in depths]
        # No prompt ends with a block: what a known prompt computes would depend on the order.
        lengths = (64 * len(ids) + rng.randint(1, 63), rng.randint(1, 40))
        table.append(ids, lengths, number * interval, number % tenants)
    return Workload("random", table, 64)
