"""The daemon against a real server, with workers made of protocol calls."""

import redis

from support.fake_worker import FakeWorker
from support.scheduler_process import LIVENESS_SECONDS, SchedulerProcess
from support.shard import submit
from support.wait import wait_until


def test_a_submitted_job_reaches_a_worker(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = FakeWorker(redis_client)

    job_id = submit(redis_client)

    claims = wait_until(worker.read, LIVENESS_SECONDS)
    assert [(claim.job_id, claim.fence) for claim in claims] == [(job_id, 1)]
    assert worker.finish(claims[0]).accepted
