"""How long a job is likely to wait, as its handle tells."""

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.twins import Twin
from tidemill.protocol import calls
from tidemill.protocol.calls import Backlog, Measures
from tidemill.protocol.functions import run

#: Ten jobs of one tenant, two a second.
BACKLOG = Backlog((0.0, 1_000.0, 0.0), (0, 1, 0), 200.0, (0, 10, 0))


@pytest.fixture
def told(redis_client: redis.Redis, mill: FakeMill) -> None:
    run(redis_client, calls.measure(KEYS, Measures(1.0, 1.0, 1.0, 0, "fsync", "r1", BACKLOG)))


def test_before_a_leader_has_measured_nobody_knows(producer: Twin, mill: FakeMill) -> None:
    job = producer.submit([1], deadline=1)
    assert job.estimated_wait is None
    assert not job.deadline_at_risk


def test_each_waiting_job_of_the_tenant_makes_the_next_one_wait(producer: Twin, told: None) -> None:
    jobs = [producer.submit([1]) for _ in range(4)]
    # And 5 ms for the one token of the job itself; the first takes turns with those that were told.
    assert [job.estimated_wait for job in jobs] == [0.01, 0.505, 1.005, 1.505]
    assert producer.submit([1], delay=60).estimated_wait == pytest.approx(62.005)


def test_a_deadline_that_the_wait_exceeds_is_at_risk_and_the_job_is_queued(
    producer: Twin, told: None, redis_client: redis.Redis
) -> None:
    for _ in range(4):
        producer.submit([1])
    late, early = producer.submit([1], deadline=1.9), producer.submit([1], deadline=60)
    assert (late.deadline_at_risk, early.deadline_at_risk) == (True, False)
    assert redis_client.hget(KEYS.job(late.id), "st") == b"queued"


def test_jobs_submitted_together_are_told_apart(producer: Twin, told: None) -> None:
    jobs = producer.submit_many([[1], [1], [1]])
    assert [job.estimated_wait for job in jobs] == [0.01, 0.505, 1.005]


def test_a_handle_without_a_receipt_knows_nothing(producer: Twin, told: None) -> None:
    job = producer.submit([1], idempotency_key="k")
    assert job.estimated_wait == 0.01
    assert producer.submit([1], idempotency_key="k").estimated_wait is None
    assert producer.job(job.id).estimated_wait is None
    assert not producer.job(job.id).deadline_at_risk
