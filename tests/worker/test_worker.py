"""A whole worker, with a fake model, against a real server."""

import redis

from support import shard
from support.fake_engine import generate
from support.shard import KEYS, read_log
from support.wait import wait_until
from support.worker_rig import Rig, make_request, result_of, state_of, submit


def test_a_job_is_generated_published_and_finished(redis_client: redis.Redis, rig: Rig) -> None:
    rig.runner.run_free()
    job_id = rig.give(make_request((5, 6, 7), num_tokens=10))
    rig.wait_for(job_id, "done")
    expected = generate([5, 6, 7], 10)
    log = read_log(redis_client, job_id)
    assert (log.ids, log.terminals) == (expected, ["done"])
    result = result_of(redis_client, job_id)
    assert list(result.ids) == expected
    assert result.text == "".join(f"{token} " for token in expected)
    assert result.end.finish_reason == "length"
    assert (result.end.usage.prompt_tokens, result.end.usage.completion_tokens) == (3, 10)


def test_many_jobs_at_once_end_with_their_own_tokens(redis_client: redis.Redis, rig: Rig) -> None:
    rig.runner.run_free()
    prompts = [(i, i + 1, 2 * i) for i in range(1, 41)]
    jobs = [rig.give(make_request(prompt, num_tokens=12)) for prompt in prompts]
    for job_id, prompt in zip(jobs, prompts, strict=True):
        rig.wait_for(job_id, "done")
        assert read_log(redis_client, job_id).ids == generate(prompt, 12)


def test_the_first_token_is_published_before_the_job_goes_on(
    redis_client: redis.Redis, rig: Rig
) -> None:
    job_id = rig.give(make_request(num_tokens=5))
    rig.runner.allow(1)
    rig.wait_for_tokens(job_id, 1)
    assert len(rig.runner.plans) == 1
    assert read_log(redis_client, job_id).ids == generate([1, 2, 3], 1)


def test_stored_entries_have_the_boundaries_of_the_log(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(num_tokens=6))
    for num_tokens in range(1, 7):
        rig.runner.allow(1)
        if num_tokens < 6:
            rig.wait_for_tokens(job_id, num_tokens)
    rig.wait_for(job_id, "done")
    result = result_of(redis_client, job_id)
    assert [end for end, _ in result.entries] == [1, 2, 3, 4, 5, 6]
    assert sum(chars for _, chars in result.entries) == len(result.text)


def test_a_text_prompt_is_tokenised_by_the_worker(redis_client: redis.Redis, rig: Rig) -> None:
    rig.runner.run_free()
    request = make_request(prompt_ids=None, prompt="tide mill water")
    job_id = rig.give(request)
    rig.wait_for(job_id, "done")
    assert read_log(redis_client, job_id).ids == generate([1, 2, 3], 8)


def test_a_bad_job_fails_and_its_neighbour_does_not(redis_client: redis.Redis, rig: Rig) -> None:
    rig.runner.run_free()
    too_long = rig.give(make_request(tuple(range(1, 129))))
    other_tokenizer = rig.give(make_request(tokenizer_digest="0" * 64))
    other_model = rig.give(make_request(model="another"))
    good = rig.give(make_request())
    rig.wait_for(good, "done")
    for job_id, word in ((too_long, "128"), (other_tokenizer, "tokenizer"), (other_model, "model")):
        rig.wait_for(job_id, "failed")
        end = result_of(redis_client, job_id).end
        assert end.finish_reason == "error"
        assert word in (end.error or "")


def test_a_job_too_large_for_the_cache_fails(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    with Rig(redis_client, redis_url, epoch, num_blocks=8).running() as rig:
        job_id = rig.give(make_request(num_tokens=40))
        rig.wait_for(job_id, "failed")
    assert "KV cache holds 32" in (result_of(redis_client, job_id).end.error or "")


def test_a_cancelled_job_stops_computing(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(num_tokens=120))
    rig.runner.allow(2)
    rig.wait_for_tokens(job_id, 2)
    assert shard.cancel(redis_client, job_id, rig.worker_id)[0] == 1

    def has_stopped() -> bool:
        status = rig.last_status()
        return status.num_running == 0 and status.generated_tokens > 0

    rig.step_until(has_stopped)
    assert len(rig.runner.plans) < 120
    log = read_log(redis_client, job_id)
    assert log.terminals == ["cancelled"]
    assert log.ids == generate([1, 2, 3], len(log.ids))


def test_a_job_that_went_to_another_worker_is_dropped(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(num_tokens=100))
    rig.runner.allow(2)
    rig.wait_for_tokens(job_id, 2)
    rig.take_away(job_id)
    shard.dispatch(redis_client, job_id, rig.epoch, worker="wkr_other")
    rig.runner.run_free()
    rig.wait_for_status(lambda status: status.num_running == 0 and status.generated_tokens > 0)
    assert state_of(redis_client, job_id) == "run"
    shard.cancel(redis_client, job_id, "wkr_other")
    assert read_log(redis_client, job_id).ids == generate([1, 2, 3], 2)


def test_a_job_taken_over_goes_on_where_the_log_ends(
    redis_client: redis.Redis, redis_url: str, rig: Rig
) -> None:
    job_id = rig.give(make_request((9, 9, 8), num_tokens=20))
    rig.runner.allow(7)
    rig.wait_for_tokens(job_id, 7)
    rig.take_away(job_id)
    second = Rig(redis_client, redis_url, rig.epoch)
    second.runner.run_free()
    with second.running():
        second.dispatch(job_id)
        second.wait_for(job_id, "done")
    log = read_log(redis_client, job_id)
    assert log.ids == generate([9, 9, 8], 20)
    assert 1 in log.writers
    assert len(second.runner.plans) == 13
    result = result_of(redis_client, job_id)
    assert list(result.ids) == log.ids
    assert result.text == "".join(f"{token} " for token in log.ids)


def test_a_job_whose_tokens_are_all_in_the_log_ends_without_a_step(
    redis_client: redis.Redis, rig: Rig
) -> None:
    job_id = submit(redis_client, make_request(num_tokens=3))
    fence = shard.dispatch(redis_client, job_id, rig.epoch, worker="wkr_dead").fence
    assert shard.append(redis_client, job_id, fence, 0, 3, worker="wkr_dead").accepted
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1
    rig.dispatch(job_id)
    rig.wait_for(job_id, "done")
    assert rig.runner.plans == []
    assert read_log(redis_client, job_id).ids == [0, 1, 2]
    assert result_of(redis_client, job_id).ids == (0, 1, 2)


def test_a_job_that_comes_back_to_the_same_worker_is_run_once(
    redis_client: redis.Redis, rig: Rig
) -> None:
    job_id = rig.give(make_request(num_tokens=30))
    rig.runner.allow(3)
    rig.wait_for_tokens(job_id, 3)
    rig.take_away(job_id)
    rig.dispatch(job_id)
    rig.runner.run_free()
    rig.wait_for(job_id, "done")
    assert read_log(redis_client, job_id).ids == generate([1, 2, 3], 30)
    rig.wait_for_status(lambda status: status.num_running == 0)


def test_the_status_counts_every_command_it_names(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(tuple(range(1, 41)), num_tokens=4))
    last = redis_client.xrevrange(KEYS.commands(rig.worker_id), count=1)[0][0].decode()
    rig.runner.run_free()
    rig.wait_for(job_id, "done")
    status = rig.wait_for_status(lambda status: status.last_command == last)
    assert status.waiting_tokens == 0
    assert status.generated_tokens == 4


def test_nobody_is_asked_twice_when_the_worker_is_idle(redis_client: redis.Redis, rig: Rig) -> None:
    rig.wait_for_status(lambda status: status.num_running == 0)
    assert rig.runner.plans == []
    assert redis_client.zscore(KEYS.workers, rig.worker_id) is not None


def test_a_quiet_worker_keeps_the_leases_of_its_jobs(redis_client: redis.Redis, rig: Rig) -> None:
    job_id = rig.give(make_request(), lease_ms=1)
    before = redis_client.zscore(KEYS.running, job_id) or 0
    wait_until(lambda: (redis_client.zscore(KEYS.running, job_id) or 0) > before + 1000)
    rig.runner.run_free()
    rig.wait_for(job_id, "done")
