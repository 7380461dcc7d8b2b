"""Steps that raise: the worker lives on, the guilty job fails, its neighbours do not notice."""

import redis

from support import shard
from support.fake_engine import generate
from support.shard import read_log
from support.worker_rig import GARBLED, Rig, make_request, result_of, submit

POISON = 666


def test_a_step_that_fails_once_costs_nobody_anything(redis_client: redis.Redis, rig: Rig) -> None:
    rig.runner.fail_before = {3}
    rig.runner.fail_after = {6}
    prompts = [(1, 2, 3), (4, 5, 6)]
    jobs = [rig.give(make_request(prompt, num_tokens=20)) for prompt in prompts]
    rig.runner.run_free()
    for job_id, prompt in zip(jobs, prompts, strict=True):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, 20)


def test_a_poisoned_prompt_fails_and_its_neighbours_go_on(
    redis_client: redis.Redis, rig: Rig
) -> None:
    rig.runner.poison = {POISON}
    prompts = [(1, 2), (3, POISON), (5, 6), (7, 8)]
    jobs = [rig.give(make_request(prompt, num_tokens=30)) for prompt in prompts]
    rig.runner.run_free()
    for job_id, prompt in zip(jobs, prompts, strict=True):
        rig.wait_for(job_id, "failed" if POISON in prompt else "done")
        if POISON in prompt:
            assert "engine fails on this job" in (result_of(redis_client, job_id).end.error or "")
        else:
            assert read_log(redis_client, job_id).ids == generate(prompt, 30)
    rig.engine.step_scheduler.check_integrity()


def test_a_poisoned_prompt_among_running_jobs_disturbs_no_stream(
    redis_client: redis.Redis, rig: Rig
) -> None:
    rig.runner.poison = {POISON}
    running = rig.give(make_request((1, 2), num_tokens=60))
    rig.runner.allow(10)
    rig.wait_for_tokens(running, 10)
    poisoned = rig.give(make_request((POISON,)))
    late = rig.give(make_request((9, 9)))
    rig.runner.run_free()
    rig.wait_for(poisoned, "failed")
    for job_id, prompt, length in ((running, (1, 2), 60), (late, (9, 9), 8)):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, length)


def test_a_batch_that_is_too_large_is_run_in_smaller_ones(
    redis_client: redis.Redis, rig: Rig
) -> None:
    rig.runner.max_sequences = 2
    prompts = [(number, number + 1) for number in range(1, 7)]
    jobs = [rig.give(make_request(prompt, num_tokens=12)) for prompt in prompts]
    rig.runner.run_free()
    for job_id, prompt in zip(jobs, prompts, strict=True):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, 12)


def test_an_output_that_cannot_be_told_fails_alone(redis_client: redis.Redis, rig: Rig) -> None:
    prompts = [(1, 2), (GARBLED,), (5, 6)]
    jobs = [rig.give(make_request(prompt, num_tokens=30)) for prompt in prompts]
    rig.runner.run_free()
    rig.wait_for(jobs[1], "failed")
    assert len(read_log(redis_client, jobs[1]).ids) <= 2
    for job_id, prompt in ((jobs[0], (1, 2)), (jobs[2], (5, 6))):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, 30)


def test_a_log_that_cannot_be_replayed_fails_its_job_alone(
    redis_client: redis.Redis, rig: Rig, epoch: int
) -> None:
    job_id = submit(redis_client, make_request((GARBLED,)))
    fence = shard.dispatch(redis_client, job_id, epoch, worker="wkr_dead").fence
    assert shard.append(redis_client, job_id, fence, 0, 4, worker="wkr_dead").accepted
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1
    rig.runner.run_free()
    rig.dispatch(job_id)
    rig.wait_for(job_id, "failed")
    assert read_log(redis_client, job_id).ids == [0, 1, 2, 3]
    healthy = rig.give(make_request())
    rig.wait_for(healthy, "done")
