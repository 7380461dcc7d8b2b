"""Raw producers against the daemon: they only XADD and BLPOP."""

import asyncio
import json
from typing import Any

import msgpack
import pytest
import redis

from support.puppet_worker import PuppetWorker
from support.scheduler_process import (
    LIVENESS_SECONDS,
    SchedulerProcess,
    StartScheduler,
    wait_for_leader,
)
from support.shard import KEYS, cancel, lead
from support.wait import wait_until
from tidemill.protocol.calls import Backlog
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import GenerateRequest
from tidemill.service.redis import connect_async
from tidemill.service.runtime import CRASH_STATUS
from tidemill_scheduler.intake import left_out
from tidemill_scheduler.intake.front_door import FrontDoor
from tidemill_scheduler.intake.front_submitter import FrontSubmitter
from tidemill_scheduler.tasks import end_tasks


def put(client: redis.Redis, body: Any, v: str = "1") -> str:
    """Add an entry as a raw producer does; returns its id."""
    data = body if isinstance(body, bytes) else json.dumps(body)
    return client.xadd(KEYS.front_door, {"v": v, "body": data}).decode()


def ids_body(tenant: str = "default", model: str | None = "m", **more: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"prompt_ids": [1, 2, 3], "tenant": tenant}
    return {"request": request | ({"model": model} if model else {}), **more}


def answer(client: redis.Redis, entry_id: str) -> dict[str, Any]:
    """Wait for the answer as a raw producer does."""
    reply = client.blpop([KEYS.front_reply(entry_id)], timeout=LIVENESS_SECONDS)
    assert reply is not None, "no answer"
    value: dict[str, Any] = json.loads(reply[1])
    return value


def gather(worker: PuppetWorker, num: int) -> list[str]:
    def enough() -> bool:
        worker.work_off()
        return len(worker.claims) >= num

    wait_until(enough, LIVENESS_SECONDS, f"not all of {num} jobs were dispatched")
    return worker.job_ids


@pytest.fixture
def worker(redis_client: redis.Redis) -> PuppetWorker:
    return PuppetWorker(redis_client)


def test_an_entry_becomes_a_job_and_is_answered_with_its_id(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    entry_id = put(redis_client, ids_body(terms={"max_retries": 7}))

    job_id = answer(redis_client, entry_id)["job"]

    assert gather(worker, 1) == [job_id]
    assert redis_client.hget(KEYS.job(job_id), "mx") == b"7"
    assert not redis_client.xlen(KEYS.front_door)
    assert redis_client.xpending(KEYS.front_door, "sched")["pending"] == 0


def test_the_answer_tells_how_long_the_job_is_likely_to_wait(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    def is_told() -> bool:
        seconds, _ = redis_client.time()
        backlog = Backlog.read(redis_client.hget(KEYS.measures, "bk"), int(seconds) * 1000)
        return backlog is not None and backlog.tokens_per_second > 0

    wait_until(is_told, LIVENESS_SECONDS, "the leader tells of no rate")

    told = answer(redis_client, put(redis_client, ids_body()))

    # What its own prompt takes, of a few tokens.
    assert told == {"job": told["job"], "wait_ms": pytest.approx(0, abs=10)}
    assert gather(worker, 1) == [told["job"]]


def test_an_entry_written_before_there_was_a_scheduler_is_not_missed(
    worker: PuppetWorker, redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    entry_id = put(redis_client, msgpack.packb(ids_body(model=None)))

    start_scheduler()

    job_id = answer(redis_client, entry_id)["job"]
    assert gather(worker, 1) == [job_id]
    assert redis_client.hget(KEYS.job(job_id), "md") == b"m"


def test_an_entry_that_cannot_be_encoded_stops_no_other(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    half_a_pair = json.dumps({"request": {"prompt": "x", "tokenizer_digest": "\ud800"}})
    odd = put(redis_client, half_a_pair.encode())
    huge = put(redis_client, json.dumps({"request": {"prompt": "x"}, "n" * 5000: 1}).encode())
    good = put(redis_client, ids_body())

    assert answer(redis_client, odd)["error"]["type"] == "InvalidRequest"
    assert len(answer(redis_client, huge)["error"]["field"]) < 300
    assert gather(worker, 1) == [answer(redis_client, good)["job"]]
    assert int(redis_client.get(KEYS.epoch) or 0) == 1


def test_refused_entries_are_answered_and_become_dead_letters(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    nonsense = put(redis_client, b"nonsense")
    future = put(redis_client, ids_body(), v="9")
    wrong = put(redis_client, {"request": {"model": "m", "prompt": "x", "params": {"top_p": 2}}})
    too_long = put(redis_client, {"request": {"model": "m", "prompt_ids": [1] * 600}})

    errors = [answer(redis_client, e)["error"] for e in (nonsense, future, wrong, too_long)]

    kinds = ["MalformedMessage", "UnsupportedVersion", "InvalidRequest", "ContextExceeded"]
    assert [error["type"] for error in errors] == kinds
    assert errors[2]["field"] == "request.params.top_p"
    letters = {
        fields[b"e"].decode(): fields for _, fields in redis_client.xrange(KEYS.dead_letters)
    }
    assert set(letters) == {nonsense, future, wrong, too_long}
    assert (letters[nonsense][b"q"], letters[nonsense][b"b"]) == (b"front", b"nonsense")
    assert letters[wrong][b"r"].decode() == errors[2]["message"]
    kept = put(redis_client, ids_body())
    assert "job" in answer(redis_client, kept)
    gather(worker, 1)


def test_a_model_must_be_named_where_several_are_served(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    PuppetWorker(redis_client, model="other")
    wait_until(lambda: leader.log.count("serves") == 2, LIVENESS_SECONDS)

    error = answer(redis_client, put(redis_client, ids_body(model=None)))["error"]

    assert error["field"] == "request.model"
    assert error["message"].endswith("several are served: m, other")


def test_one_key_is_one_job_and_another_body_under_it_is_refused(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    first, same, other = (
        put(redis_client, ids_body(idempotency_key="k", terms={"max_retries": retries}))
        for retries in (1, 1, 2)
    )

    job_id = answer(redis_client, first)["job"]

    assert answer(redis_client, same)["job"] == job_id
    assert answer(redis_client, other)["error"]["type"] == "IdempotencyConflict"
    assert gather(worker, 1) == [job_id]


def test_a_text_is_tokenised_beside_the_loop(
    redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    PuppetWorker(redis_client, model="text", bundle=b"unreadable")
    entry_id = put(redis_client, {"request": {"prompt": "tide mill"}})

    job_id = answer(redis_client, entry_id)["job"]

    stored = decode(redis_client.hget(KEYS.job(job_id), "req") or b"", GenerateRequest)
    assert stored.prompt == "tide mill"
    cancel(redis_client, job_id, (redis_client.hget(KEYS.job(job_id), "w") or b"").decode())


def test_an_overloaded_tenant_waits_without_holding_up_others(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    redis_client.hset(KEYS.settings, "jobs:greedy", 0)
    greedy = [put(redis_client, ids_body("greedy")) for _ in range(50)]
    modest = put(redis_client, ids_body("modest"))

    assert gather(worker, 1) == [answer(redis_client, modest)["job"]]
    assert not redis_client.exists(*(KEYS.front_reply(entry_id) for entry_id in greedy))
    redis_client.hset(KEYS.settings, "jobs:greedy", 100)

    given = gather(worker, 51)[1:]
    jobs = [answer(redis_client, entry_id)["job"] for entry_id in greedy]
    assert sorted(jobs) == sorted(given)


def test_an_entry_that_its_producer_takes_back_while_it_waits_is_forgotten(
    worker: PuppetWorker, redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    redis_client.hset(KEYS.settings, "jobs:greedy", 0)
    entry_id = put(redis_client, ids_body("greedy"))

    def num_pending() -> int:
        return int(redis_client.xpending(KEYS.front_door, "sched")["pending"])

    wait_until(lambda: redis_client.xinfo_groups(KEYS.front_door), LIVENESS_SECONDS)
    wait_until(lambda: num_pending() == 1, LIVENESS_SECONDS)
    redis_client.xdel(KEYS.front_door, entry_id)

    wait_until(lambda: num_pending() == 0, LIVENESS_SECONDS)


@pytest.mark.parametrize("point", ["front_after_read", "front_after_submit"])
def test_a_crash_at_the_front_door_submits_each_entry_once(
    worker: PuppetWorker, redis_client: redis.Redis, start_scheduler: StartScheduler, point: str
) -> None:
    crashing = start_scheduler(crash_at=f"scheduler.{point}")
    wait_for_leader(redis_client)
    entries = [put(redis_client, ids_body()) for _ in range(10)]
    assert crashing.process.wait(LIVENESS_SECONDS) == CRASH_STATUS

    start_scheduler()

    jobs = [answer(redis_client, entry_id)["job"] for entry_id in entries]
    assert len(set(jobs)) == 10
    assert sorted(gather(worker, 10)) == sorted(jobs)
    assert redis_client.hget(KEYS.measures, "j") == b"10"
    assert not any(redis_client.exists(KEYS.front_reply(entry_id)) for entry_id in entries)


def test_the_group_is_made_again_after_the_server_lost_its_data(
    redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    wait_until(lambda: redis_client.exists(KEYS.front_door), LIVENESS_SECONDS)
    redis_client.delete(KEYS.front_door)
    worker = PuppetWorker(redis_client)

    entry_id = put(redis_client, ids_body())

    assert gather(worker, 1) == [answer(redis_client, entry_id)["job"]]


async def test_a_tenant_with_too_many_entries_to_remember_holds_up_no_other(
    worker: PuppetWorker,
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(left_out, "MAX_PER_LANE", 20)
    monkeypatch.setattr(left_out, "MAX_WAITING", 30)
    redis_client.hset(KEYS.settings, "jobs:greedy", 0)
    greedy = [put(redis_client, ids_body("greedy")) for _ in range(300)]
    modest = put(redis_client, ids_body("modest"))
    async with connect_async(redis_url, retries=0) as client:
        epoch = lead(redis_client)
        submitter = FrontSubmitter(client, KEYS, lambda: ["m"], 30.0, epoch=epoch)
        door = asyncio.create_task(FrontDoor(client, KEYS, epoch, submitter).run())
        await asyncio.to_thread(answer, redis_client, modest)
        assert not redis_client.exists(*map(KEYS.front_reply, greedy))
        redis_client.hset(KEYS.settings, "jobs:greedy", 1000)

        answers = [await asyncio.to_thread(answer, redis_client, e) for e in greedy]
        await end_tasks([door])

    jobs = [told["job"] for told in answers]
    queued = redis_client.xrange(KEYS.ingress("p1:greedy"))
    assert [fields[b"j"].decode() for _, fields in queued] == jobs
    assert redis_client.xpending(KEYS.front_door, "sched")["pending"] == 0
    for job_id in redis_client.scan_iter(KEYS.job("*")):
        cancel(redis_client, job_id.decode().rpartition(":")[2])
