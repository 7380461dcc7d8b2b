"""When a worker takes over a part of a group of bulk jobs that another one walks.

The work is below what an epoch shares out at its beginning, so the first worker gets all of it; and
what the jobs share is little beside their outputs, so that it may well be computed twice.
"""

from itertools import groupby

import pytest

from support.played_shard import SILENT_SECONDS, TOKENS, PlayedShard
from support.waiting_jobs import make_job
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings

#: All jobs but the interactive ones are put in prefix order.
POLICY = PolicySettings(scan_seconds=(float("inf"), 0.0, 0.0))
SHARED = 2 * TOKENS


def make_shard() -> PlayedShard:
    return PlayedShard(Scheduler(silent_seconds=SILENT_SECONDS, settings=POLICY))


def add_group(shard: PlayedShard, num_jobs: int, own_tokens: int) -> None:
    for number in range(num_jobs):
        shard.add(make_job((1, 1, number), cost=SHARED + own_tokens, priority=1))


def runs_of(dispatches: list[Dispatch]) -> list[tuple[str, int]]:
    """Which worker got how many jobs in a row."""
    return [(name, len(list(run))) for name, run in groupby(d.worker_id for d in dispatches)]


def test_a_worker_goes_on_with_its_group_until_it_has_clearly_more_than_an_idle_one() -> None:
    shard = make_shard()
    # An eighth of their slots.
    slack = 8
    walker, thief = (shard.join(max_num_seqs=8 * slack).info.worker_id for _ in range(2))
    add_group(shard, 40, own_tokens=20)
    assert runs_of(shard.tick())[:2] == [(walker, slack), (thief, slack)]


def test_an_idle_worker_takes_over_from_one_that_has_no_credit_for_more_of_its_group() -> None:
    shard = make_shard()
    walker, thief = (shard.join(max_num_batched_tokens=512).info.worker_id for _ in range(2))
    add_group(shard, 12, own_tokens=300)
    # Its first one is computed whole; two steps of 512 tokens have no room for 300 more.
    assert runs_of(shard.tick()) == [(walker, 2), (thief, 2)]


@pytest.mark.parametrize(
    ("joins_at", "asks_at"),
    [
        (0.6 * SILENT_SECONDS, 0.6 * SILENT_SECONDS),
        # Both were not heard of lately, but one of them for so long that it gets nothing at all.
        (0.6 * SILENT_SECONDS, 1.2 * SILENT_SECONDS),
    ],
)
def test_a_worker_that_has_not_been_heard_of_for_longer_gives_its_group_away(
    joins_at: float, asks_at: float
) -> None:
    shard = make_shard()
    walker = shard.join(max_num_seqs=8)
    add_group(shard, 12, own_tokens=20)
    shard.tick()
    shard.finish_all(walker)
    assert len(shard.waiting) == 3

    shard.now = joins_at
    thief = shard.join(max_num_seqs=8)
    shard.now = asks_at
    assert [dispatch.worker_id for dispatch in shard.tick()][:1] == [thief.info.worker_id]
