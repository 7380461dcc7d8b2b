"""How a worker takes its leave: nothing is lost, nothing is told twice, no lease is left behind."""

import pytest
import redis

from support.fake_engine import generate
from support.shard import KEYS, read_log
from support.worker_rig import Rig, make_request, state_of
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import WorkerStatus


def test_a_drain_lets_running_jobs_end(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(num_tokens=100))
    rig.runner.allow(3)
    rig.wait_for_tokens(job_id, 3)
    rig.begin_drain()
    rig.runner.run_free()
    rig.join()
    assert rig.left_clean
    assert state_of(redis_client, job_id) == "done"
    assert read_log(redis_client, job_id).ids == generate([1, 2, 3], 100)


@pytest.mark.leaks_keys
def test_a_job_that_arrives_during_the_drain_goes_back_at_once(
    redis_client: redis.Redis, rig: Rig
) -> None:
    running = rig.give(make_request(num_tokens=124))
    rig.runner.allow(1)
    rig.wait_for_tokens(running, 1)
    rig.begin_drain()
    late = rig.give(make_request())
    rig.step_until(lambda: state_of(redis_client, late) == "queued")
    assert state_of(redis_client, running) == "run"


def test_a_second_signal_gives_jobs_back_with_their_tokens(
    redis_client: redis.Redis, redis_url: str, rig: Rig
) -> None:
    job_id = rig.give(make_request((8, 8), num_tokens=100))
    rig.runner.allow(5)
    rig.wait_for_tokens(job_id, 5)
    rig.drain.request()
    rig.drain.request()
    rig.step_until(lambda: rig.has_left)
    assert rig.left_clean
    assert state_of(redis_client, job_id) == "queued"
    assert redis_client.zscore(KEYS.running, job_id) is None
    first = read_log(redis_client, job_id).ids
    assert 5 <= len(first) < 100
    with Rig(redis_client, redis_url, rig.epoch).running() as second:
        second.runner.run_free()
        second.dispatch(job_id)
        second.wait_for(job_id, "done")
    assert read_log(redis_client, job_id).ids == generate([8, 8], 100)


@pytest.mark.leaks_keys
def test_jobs_that_do_not_end_in_time_go_back(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    rig = Rig(redis_client, redis_url, epoch, config={"drain_seconds": 0.05})
    rig.start()
    job_id = rig.give(make_request(num_tokens=100))
    rig.runner.allow(2)
    rig.wait_for_tokens(job_id, 2)
    rig.begin_drain()
    rig.step_until(lambda: rig.has_left)
    assert state_of(redis_client, job_id) == "queued"


@pytest.mark.leaks_keys
def test_a_command_nobody_read_goes_back_to_the_queue(redis_client: redis.Redis, rig: Rig) -> None:
    rig.process._threads["commands"].close()
    job_id = rig.give(make_request())
    rig.stop()
    assert rig.left_clean
    assert state_of(redis_client, job_id) == "queued"


def test_a_worker_that_has_left_leaves_no_trace(redis_client: redis.Redis, rig: Rig) -> None:
    rig.wait_for_status(lambda status: not status.draining)
    assert redis_client.exists(KEYS.worker_info(rig.worker_id))
    rig.stop()
    assert redis_client.zscore(KEYS.workers, rig.worker_id) is None
    for key in (KEYS.worker_info, KEYS.commands, KEYS.status):
        assert not redis_client.exists(key(rig.worker_id))


def test_the_scheduler_may_ask_for_a_drain(redis_client: redis.Redis, rig: Rig) -> None:
    redis_client.xadd(KEYS.commands(rig.worker_id), {"k": "drain"})
    rig.join()
    assert rig.left_clean


@pytest.mark.leaks_keys
def test_a_dead_thread_ends_the_worker(redis_client: redis.Redis, rig: Rig) -> None:
    def fail() -> None:
        raise ZeroDivisionError("planted")

    job_id = rig.give(make_request(num_tokens=50))
    rig.runner.allow(1)
    rig.wait_for_tokens(job_id, 1)
    rig.process._threads["heartbeat"]._turn = fail
    rig.runner.run_free()
    rig.join()
    assert isinstance(rig.error, ZeroDivisionError)
    assert state_of(redis_client, job_id) in ("queued", "done")


@pytest.mark.leaks_keys
def test_the_last_status_before_a_drain_ends_says_so(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(num_tokens=124))
    rig.runner.allow(1)
    rig.wait_for_tokens(job_id, 1)
    rig.begin_drain()
    entries = redis_client.xrange(KEYS.status(rig.worker_id))
    seen = [decode(fields[b"s"], WorkerStatus).draining for _, fields in entries]
    assert seen == sorted(seen)
