"""Jobs that somebody else ends while they run: computing stops by the end of the step."""

import pytest
import redis

from support import shard
from support.fake_engine import generate
from support.shard import KEYS, read_log
from support.wait import wait_until
from support.worker_rig import Rig, make_request, submit
from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.messages import JobTerms

LIMITS = {"deadline": JobTerms(deadline_ms=400), "stalled": JobTerms(stall_ms=300)}


def _expire(client: redis.Redis, job_id: str, worker_id: str) -> str:
    """What the scheduler does once the job is due; returns the reason."""
    call = calls.expire(KEYS, shard.ref_of(client, job_id), worker_id=worker_id)
    return wait_until(lambda: run(client, call), what="the job expires")


def _give(rig: Rig, terms: JobTerms, *, num_tokens: int = 100) -> str:
    job_id = submit(rig.client, make_request(num_tokens=num_tokens), terms)
    rig.dispatch(job_id)
    return job_id


def _is_idle(rig: Rig) -> bool:
    return not rig.process._jobs.all() and not rig.engine.step_scheduler.has_work


@pytest.mark.parametrize("reason", LIMITS)
def test_a_running_job_whose_time_is_over_is_computed_no_further(
    redis_client: redis.Redis, rig: Rig, reason: str
) -> None:
    job_id = _give(rig, LIMITS[reason])
    rig.runner.allow(3)
    rig.wait_for_tokens(job_id, 3)
    # The model is in the middle of a step, and stays there until the job's time is over.
    wait_until(rig.runner.waiting.is_set)
    assert _expire(redis_client, job_id, rig.worker_id) == reason
    wait_until(lambda: _command_was_read(rig), what="the cancel command is read")
    rig.runner.allow(1)
    wait_until(lambda: _is_idle(rig), what="the job is dropped")
    assert len(rig.runner.plans) == 4
    log = read_log(redis_client, job_id)
    assert (log.ids, log.terminals) == (generate([1, 2, 3], 3), ["expired"])


def test_a_job_that_waits_in_the_worker_expires_there(redis_client: redis.Redis, rig: Rig) -> None:
    running = rig.give(make_request(num_tokens=100))
    rig.runner.allow(1)
    rig.wait_for_tokens(running, 1)
    wait_until(rig.runner.waiting.is_set)
    # Not even admitted: the worker counts as its runner from the dispatch on.
    waiting = _give(rig, LIMITS["stalled"])
    assert _expire(redis_client, waiting, rig.worker_id) == "stalled"
    wait_until(lambda: _command_was_read(rig), what="the cancel command is read")
    rig.runner.run_free()
    rig.wait_for(running, "done")
    assert read_log(redis_client, waiting).ids == []
    assert len(rig.runner.plans) == 100


def test_a_job_that_still_makes_tokens_is_left_alone(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = _give(rig, JobTerms(stall_ms=60_000), num_tokens=20)
    rig.runner.run_free()
    call = calls.expire(KEYS, shard.ref_of(redis_client, job_id), worker_id=rig.worker_id)
    assert run(redis_client, call) == ""
    rig.wait_for(job_id, "done")
    assert redis_client.zcard(KEYS.due) == 0


def test_tokens_that_come_after_the_end_are_not_told(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = _give(rig, LIMITS["deadline"])
    rig.runner.allow(2)
    rig.wait_for_tokens(job_id, 2)
    # Nobody tells the worker: its next write is what finds out.
    rig.process._threads["commands"].close()
    assert _expire(redis_client, job_id, rig.worker_id) == "deadline"
    rig.runner.run_free()
    wait_until(lambda: _is_idle(rig), what="the job is dropped")
    log = read_log(redis_client, job_id)
    assert (log.ids, log.terminals) == (generate([1, 2, 3], 2), ["expired"])


def _command_was_read(rig: Rig) -> bool:
    last = rig.client.xrevrange(KEYS.commands(rig.worker_id), count=1)[0][0].decode()
    return rig.process._reader.cursor == last
