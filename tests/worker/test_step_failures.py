"""Steps that raise: the worker lives on, the guilty job goes back, its neighbours do not notice."""

import pytest
import redis

from support import shard
from support.fake_engine import FakeSampler, generate
from support.shard import KEYS, read_log
from support.wait import wait_until
from support.worker_rig import GARBLED, Rig, make_request, state_of, submit
from tidemill.protocol.codec import decode
from tidemill.protocol.errors import EngineFailed, NoTokenLeft
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.sampled_token import SampledToken

POISON = 666


def _retries(client: redis.Redis, job_id: str) -> int:
    return int(client.hget(KEYS.job(job_id), "rt") or 0)


def _end_of(client: redis.Redis, job_id: str) -> JobEnd:
    ((_, fields),) = client.xrevrange(KEYS.token_log(job_id), count=1)
    return decode(fields[b"e"], JobEnd)


def test_a_step_that_fails_once_costs_nobody_anything(redis_client: redis.Redis, rig: Rig) -> None:
    rig.runner.fail_before = {3}
    rig.runner.fail_after = {6}
    prompts = [(1, 2, 3), (4, 5, 6)]
    jobs = [rig.give(make_request(prompt, num_tokens=20)) for prompt in prompts]
    rig.runner.run_free()
    for job_id, prompt in zip(jobs, prompts, strict=True):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, 20)
        assert _retries(redis_client, job_id) == 0


def test_a_poisoned_prompt_is_retried_to_its_death_and_its_neighbours_go_on(
    redis_client: redis.Redis, rig: Rig
) -> None:
    rig.runner.poison = {POISON}
    prompts = [(1, 2), (3, POISON), (5, 6), (7, 8)]
    jobs = [rig.give(make_request(prompt, num_tokens=30)) for prompt in prompts]
    rig.runner.run_free()
    rig.exhaust(jobs[1])
    end = _end_of(redis_client, jobs[1])
    assert (end.state, end.finish_reason) == ("dead", "error")
    assert "engine fails on this job, also when it runs alone" in (end.error or "")
    for job_id, prompt in zip(jobs, prompts, strict=True):
        if POISON not in prompt:
            rig.wait_for(job_id, "done")
            assert read_log(redis_client, job_id).ids == generate(prompt, 30)
            assert _retries(redis_client, job_id) == 0
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
    rig.exhaust(poisoned)
    for job_id, prompt, length in ((running, (1, 2), 60), (late, (9, 9), 8)):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, length)


@pytest.mark.parametrize("is_beams", [True, False])
def test_a_job_that_begins_anew_after_each_failure_cannot_fail_for_ever(
    redis_client: redis.Redis, rig: Rig, is_beams: bool
) -> None:
    if is_beams:
        several = {"n": 2, "use_beam_search": True}
    else:
        several = {"best_of": 3, "temperature": 1.0, "seed": 7}
    rig.runner.poison, rig.runner.poison_from = {POISON}, 3
    params = SamplingParams(max_tokens=10, **several)
    poisoned = rig.give(make_request((1, POISON), params=params))
    neighbour = rig.give(make_request((3, 4), params=params))
    stream = rig.give(make_request((5, 6), num_tokens=60))
    rig.runner.run_free()
    rig.exhaust(poisoned)
    assert "engine fails on this job" in (_end_of(redis_client, poisoned).error or "")
    for job_id in (neighbour, stream):
        rig.wait_for(job_id, "done")
        assert _retries(redis_client, job_id) == 0
    assert read_log(redis_client, stream).ids == generate((5, 6), 60)
    rig.engine.step_scheduler.check_integrity()


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
        assert _retries(redis_client, job_id) == 0


def test_a_job_that_failed_for_a_while_goes_on_where_it_stopped(
    redis_client: redis.Redis, rig: Rig
) -> None:
    job_id = rig.give(make_request((POISON, 2), num_tokens=20))
    rig.runner.allow(6)
    rig.wait_for_tokens(job_id, 6)
    rig.runner.poison = {POISON}
    rig.runner.run_free()
    rig.wait_for(job_id, "delayed")
    written = read_log(redis_client, job_id).ids
    assert written == generate((POISON, 2), len(written))
    assert b"RuntimeError" in (redis_client.hget(KEYS.job(job_id), "err") or b"")
    rig.runner.poison = set()
    rig.retry(job_id)
    rig.wait_for(job_id, "done")
    log = read_log(redis_client, job_id)
    assert (log.ids, log.terminals) == (generate((POISON, 2), 20), ["done"])
    assert _retries(redis_client, job_id) == 1


def test_an_output_that_cannot_be_told_goes_back_alone(redis_client: redis.Redis, rig: Rig) -> None:
    prompts = [(1, 2), (GARBLED,), (5, 6)]
    jobs = [rig.give(make_request(prompt, num_tokens=30)) for prompt in prompts]
    rig.runner.run_free()
    rig.exhaust(jobs[1])
    assert len(read_log(redis_client, jobs[1]).ids) <= 2
    for job_id, prompt in ((jobs[0], (1, 2)), (jobs[2], (5, 6))):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, 30)
        assert _retries(redis_client, job_id) == 0


def test_a_log_that_cannot_be_replayed_harms_its_job_alone(
    redis_client: redis.Redis, rig: Rig, epoch: int
) -> None:
    job_id = submit(redis_client, make_request((GARBLED,)))
    fence = shard.dispatch(redis_client, job_id, epoch, worker="wkr_dead").fence
    assert shard.append(redis_client, job_id, fence, 0, 4, worker="wkr_dead").accepted
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1
    rig.runner.run_free()
    rig.dispatch(job_id)
    rig.exhaust(job_id)
    assert read_log(redis_client, job_id).ids == [0, 1, 2, 3]
    healthy = rig.give(make_request())
    rig.wait_for(healthy, "done")


def test_a_log_that_breaks_off_fails_its_job_at_once(
    redis_client: redis.Redis, rig: Rig, epoch: int
) -> None:
    job_id = submit(redis_client, make_request())
    fence = shard.dispatch(redis_client, job_id, epoch, worker="wkr_dead").fence
    assert shard.append(redis_client, job_id, fence, 0, 2, worker="wkr_dead").accepted
    redis_client.hset(KEYS.job(job_id), "n", "5")
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1
    rig.dispatch(job_id)
    rig.wait_for(job_id, "failed")
    assert "breaks off at token 2 of 5" in (_end_of(redis_client, job_id).error or "")
    wait_until(lambda: not rig.process._jobs.all(), what="the job is done with")


@pytest.mark.leaks_keys
def test_a_broken_engine_ends_its_worker_and_blames_no_job(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    rig = Rig(redis_client, redis_url, epoch)
    rig.start()
    prompts = [(1, 2), (3, 4), (5, 6)]
    jobs = [rig.give(make_request(prompt, num_tokens=40)) for prompt in prompts]
    rig.runner.allow(4)
    rig.wait_for_tokens(jobs[0], 4)
    rig.runner.max_sequences = 0
    rig.runner.run_free()
    rig.join()
    assert isinstance(rig.error, EngineFailed)
    assert "fails on everything" in str(rig.error)
    for job_id in jobs:
        assert state_of(redis_client, job_id) == "queued"
        assert _retries(redis_client, job_id) == 0
    with Rig(redis_client, redis_url, epoch).running() as second:
        second.runner.run_free()
        for job_id, prompt in zip(jobs, prompts, strict=True):
            second.dispatch(job_id)
            second.wait_for(job_id, "done")
            assert read_log(redis_client, job_id).ids == generate(prompt, 40)


def test_a_job_whose_parameters_leave_no_token_fails_alone_and_at_once(
    redis_client: redis.Redis, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = FakeSampler.sample

    def sample(self: FakeSampler, logits: list[int], rows: list[Sequence]) -> list[SampledToken]:
        if hopeless := tuple(row.seq_id for row in rows if POISON in row.prompt_ids):
            raise NoTokenLeft(hopeless)
        return choose(self, logits, rows)

    monkeypatch.setattr(FakeSampler, "sample", sample)
    prompts = [(1, 2), (3, POISON), (5, 6)]
    jobs = [rig.give(make_request(prompt, num_tokens=30)) for prompt in prompts]
    rig.runner.run_free()
    rig.wait_for(jobs[1], "failed")
    assert "allows and forbids leaves no token" in (_end_of(redis_client, jobs[1]).error or "")
    for place in (0, 2):
        rig.wait_for(jobs[place], "done")
        assert read_log(redis_client, jobs[place]).ids == generate(prompts[place], 30)
    rig.engine.step_scheduler.check_integrity()
