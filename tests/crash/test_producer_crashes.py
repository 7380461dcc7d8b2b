"""The crash matrix, rows of those around the queue: producers, and consumers of ended jobs."""

from pathlib import Path

import pytest
import redis

from crash import points
from support.crash_stage import NUM_JOBS, SLOW_SECONDS, CrashStage
from support.recorder import Record, plan_jobs
from support.shard import KEYS


@pytest.mark.parametrize("point", points.PRODUCER_POINTS)
def test_producer_dies_around_submit_and_finds_its_jobs_again(
    stage: CrashStage, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker()
    stage.expect_crash(stage.producer(jobs, crash_at=point))
    assert len(stage.job_ids()) == (NUM_JOBS if "after" in point else 0)

    stage.expect_success(stage.producer(jobs))

    stage.judge(jobs)
    [accepted] = [record.accepted for path in stage.records if (record := Record.load(path)).ends]
    assert {is_new for _, is_new in accepted.values()} == {"before" in point}


def test_producer_is_killed_in_mid_stream_and_follows_again(stage: CrashStage) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(step_seconds=SLOW_SECONDS)
    first = stage.producer(jobs)
    stage.wait_for_tokens(3, NUM_JOBS)
    first.kill()

    stage.expect_success(stage.producer(jobs))

    stage.judge(jobs)


def test_consumer_of_ended_jobs_dies_before_it_acknowledges_and_reads_again(
    stage: CrashStage, redis_client: redis.Redis, tmp_path: Path
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    redis_client.hset(KEYS.settings, "back:*", 1000)
    stage.leader()
    stage.worker()
    stage.expect_success(stage.producer(jobs))
    out = KEYS.back_door("default")
    delivered = tmp_path / "delivered"
    first = stage.consumer(out, delivered, crash_at="test.before_ack:2")
    stage.expect_crash(first)

    second = stage.consumer(out, delivered)

    assert second.wait() == 0, stage.logs()
    ids = set(stage.judge(jobs).values())
    told = delivered.read_text().split()
    assert set(told) == ids
    assert len(told) == len(ids) + 1, "only what was not acknowledged comes again"
    assert redis_client.xpending(out, "tests")["pending"] == 0
    assert redis_client.xlen(out) == len(ids), "one entry per ended job"
