"""Batches from their creation to their end, with runners in this process."""

import asyncio

import pytest
import redis

from support.batch_shop import (
    FAST,
    StartRunner,
    create,
    ended,
    jsonl,
    outcome,
    request_line,
    serving,
    upload,
)
from support.fake_mill import Attempt
from support.shard import KEYS, server_ms
from support.wait import wait_until_async
from tidemill.batches.client import AsyncBatches
from tidemill.protocol.errors import InvalidRequest, NoSuchObject, WrongState
from tidemill.service.blobs.store import BlobStore
from tidemill_scheduler.batches.runner import BatchRunner
from tidemill_scheduler.tasks import end_tasks


async def test_every_line_is_answered_once_and_counted(
    client: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    batch = await create(client, [request_line(n) for n in range(120)], metadata={"run": "nightly"})
    assert batch.plain()["status"] == "validating"
    with serving(redis_url):
        async with start_runner():
            batch = await ended(client, batch)
    told = batch.plain()
    assert told["status"] == "completed" and told["model"] == "m"
    assert told["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
    assert told["usage"]["input_tokens"] == 360 and told["usage"]["total_tokens"] == 600
    assert told["metadata"] == {"run": "nightly"} and told["errors"] is None
    times = [told[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    assert told["error_file_id"] is None and told["failed_at"] is None
    output, errors = await outcome(client, batch)
    assert sorted(line["custom_id"] for line in output) == sorted(f"id-{n}" for n in range(120))
    assert len({line["id"] for line in output}) == 120 and not errors
    response = output[0]["response"]
    assert response["status_code"] == 200 and response["request_id"].startswith("job_")
    assert response["body"]["choices"][0]["text"] == "w0 w1 "
    file = await client.file(told["output_file_id"])
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.batch_id}_output.jsonl")


async def test_what_is_left_of_a_batch_is_its_files_and_its_object(
    client: AsyncBatches,
    redis_url: str,
    redis_client: redis.Redis,
    blobs: BlobStore,
    start_runner: StartRunner,
) -> None:
    batch = await create(client, [request_line(1), request_line(2, prompt=[])])
    with serving(redis_url):
        async with start_runner() as task:
            batch = await ended(client, batch)
            await wait_until_async(lambda: len(list(blobs.list())) == 3)
            assert not task.done()
    assert not redis_client.exists(KEYS.batch_parts("default", batch.batch_id))
    assert not redis_client.exists(KEYS.active_batches)
    assert redis_client.pttl(KEYS.batch_object("default", batch.batch_id)) > 29 * 86_400_000


async def test_lines_that_cannot_run_go_to_the_error_file(
    client: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    def work(attempt: Attempt) -> None:
        last = (attempt.request.prompt_ids or (0,))[-1]
        attempt.finish(1, state="failed" if last == 3 else "done", error="it is odd")

    lines = [
        request_line(1),
        request_line(2, temperature=-1),
        request_line(3),
        request_line(4, model="other"),
        request_line(5, prompt=None),
    ]
    batch = await create(client, lines)
    with serving(redis_url, work):
        async with start_runner():
            batch = await ended(client, batch)
    assert batch.plain()["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    output, errors = await outcome(client, batch)
    assert [line["custom_id"] for line in output] == ["id-1"]
    found = {line["custom_id"]: line["response"] for line in errors}
    assert {name: told["status_code"] for name, told in found.items()} == {
        "id-2": 400,
        "id-3": 400,
        "id-4": 404,
        "id-5": 400,
    }
    assert found["id-2"]["body"]["error"]["param"].endswith("temperature")
    assert "it is odd" in found["id-3"]["body"]["error"]["message"]
    assert found["id-4"]["body"]["error"]["code"] == "model_not_found"


async def test_an_invalid_input_fails_with_a_report_by_line(
    client: AsyncBatches, start_runner: StartRunner
) -> None:
    other = {**request_line(4), "url": "/v1/embeddings", "method": "GET"}
    lines = [
        request_line(1),
        b"not json",
        request_line(1),
        other,
        {"custom_id": 5, "method": "POST", "url": "/v1/completions"},
        b'{"custom_id": "' + b"x" * (1 << 20) + b'"}',
        b"",
        b"[]",
    ]
    batch = await create(client, lines)
    async with start_runner():
        batch = await ended(client, batch)
    told = batch.plain()
    assert told["status"] == "failed" and told["failed_at"] is not None
    assert told["output_file_id"] is None and told["error_file_id"] is None
    assert [(e["line"], e["code"], e["param"]) for e in told["errors"]["data"]] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_method", "method"),
        (4, "invalid_url", "url"),
        (5, "missing_required_parameter", "body"),
        (5, "invalid_custom_id", "custom_id"),
        (6, "line_too_long", None),
        (8, "invalid_json_line", None),
    ]


async def test_a_cancelled_batch_keeps_its_partial_output(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    served: list[str] = []

    def work(attempt: Attempt) -> None:
        if len(served) < 60:
            served.append(attempt.job_id)
            attempt.finish(1)

    batch = await create(client, [request_line(n) for n in range(360)])
    with serving(redis_url, work):
        async with start_runner(max_in_flight=100):
            await wait_until_async(lambda: len(served) == 60)
            stopped = await client.cancel_batch(batch.batch_id)
            assert stopped.plain()["status"] in ("cancelling", "cancelled")
            batch = await ended(client, batch)
    told = batch.plain()
    assert told["status"] == "cancelled" and told["cancelling_at"] <= told["cancelled_at"]
    assert told["request_counts"] == {"total": 360, "completed": 60, "failed": 300}
    output, errors = await outcome(client, batch)
    ids = [line["custom_id"] for line in (*output, *errors)]
    assert sorted(ids) == sorted(f"id-{n}" for n in range(360))
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert all(line["response"] is None for line in errors)
    states = [redis_client.hget(key, "st") for key in redis_client.scan_iter(KEYS.job("*"))]
    assert set(states) == {b"done", b"cancelled"} and len(states) < 360
    assert (await client.cancel_batch(batch.batch_id)).state == "cancelled"


async def test_an_expired_batch_keeps_its_partial_output(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    served: list[str] = []

    def work(attempt: Attempt) -> None:
        if len(served) < 20:
            served.append(attempt.job_id)
            attempt.finish(1)

    batch = await create(client, [request_line(n) for n in range(120)], completion_window="1m")
    assert batch.expires_ms - batch.created_ms == 60_000
    with serving(redis_url, work):
        async with start_runner():
            await wait_until_async(lambda: len(served) == 20)
            key = KEYS.batch_object("default", batch.batch_id)
            redis_client.hset(key, "xa", server_ms(redis_client))
            batch = await ended(client, batch)
    told = batch.plain()
    assert told["status"] == "expired" and told["expired_at"] is not None
    output, errors = await outcome(client, batch)
    assert len(output) == 20 and len(errors) == 100
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


@pytest.mark.leaks_keys
async def test_progress_is_told_while_a_part_is_worked_on(
    client: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    served: list[str] = []

    def work(attempt: Attempt) -> None:
        if len(served) < 30:
            served.append(attempt.job_id)
            attempt.finish(1)

    batch = await create(client, [request_line(n) for n in range(100)])
    with serving(redis_url, work):
        async with start_runner():
            while (await client.batch(batch.batch_id)).num_answered < 30:
                await asyncio.sleep(0.02)
            found = await client.batch(batch.batch_id)
    assert (found.state, found.total, found.num_answered) == ("in_progress", 100, 30)


async def test_a_full_queue_holds_lines_up_and_fails_none(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    redis_client.hset(KEYS.settings, "jobs:*", 10)
    batch = await create(client, [request_line(n) for n in range(40)])
    with serving(redis_url):
        async with start_runner():
            batch = await ended(client, batch)
    assert batch.plain()["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


async def test_a_result_that_was_forgotten_before_it_was_read_is_made_again(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    runs: list[int] = []

    def work(attempt: Attempt) -> None:
        number = (attempt.request.prompt_ids or (0,))[-1]
        runs.append(number)
        if number == 1 and runs.count(1) == 1:
            # In one step, so that nobody reads the result in between.
            with redis_client.pipeline(transaction=True) as pipe:
                key = f"{attempt.batch}:1"
                pipe.delete(KEYS.job(attempt.job_id), KEYS.token_log(attempt.job_id))
                pipe.delete(KEYS.idempotency("default", key))
                pipe.zrem(KEYS.running, attempt.job_id)
                pipe.srem(KEYS.batch_members("default", attempt.batch), attempt.job_id)
                pipe.hincrby(KEYS.counters, "r:default", -1)
                pipe.publish(KEYS.token_channel(attempt.job_id), b"9007199254740991-0 ")
                pipe.execute()
        else:
            attempt.finish(1)

    batch = await create(client, [request_line(n) for n in range(1, 4)])
    with serving(redis_url, work):
        async with start_runner():
            batch = await ended(client, batch)
    output, errors = await outcome(client, batch)
    assert sorted(line["custom_id"] for line in output) == ["id-1", "id-2", "id-3"] and not errors


async def test_another_runner_goes_on_where_one_has_died(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    served: list[str] = []

    def work(attempt: Attempt) -> None:
        served.append(attempt.job_id)
        attempt.finish(1)

    batch = await create(client, [request_line(n) for n in range(270)])
    with serving(redis_url, work):
        async with start_runner():
            await wait_until_async(lambda: len(served) > 60)
        async with start_runner():
            batch = await ended(client, batch)
    output, errors = await outcome(client, batch)
    assert sorted(line["custom_id"] for line in output) == sorted(f"id-{n}" for n in range(270))
    assert not errors and len(served) == 270


async def test_two_runners_share_the_batches_and_write_each_line_once(
    client: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    batches = [await create(client, [request_line(n) for n in range(10)]) for _ in range(4)]
    with serving(redis_url):
        async with start_runner(max_batches=2), start_runner(max_batches=2):
            for batch in batches:
                output, errors = await outcome(client, await ended(client, batch))
                assert len(output) == 10 and not errors


async def test_the_input_may_be_deleted_while_its_batch_works(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    batch = await create(client, [request_line(n) for n in range(5)])
    await client.delete_file(batch.input_file_id)
    [(_, until)] = [
        each
        for each in redis_client.zrange(KEYS.stored_until, 0, -1, withscores=True)
        if each[0].startswith(b"file")
    ]
    assert until > batch.expires_ms
    with serving(redis_url):
        async with start_runner():
            batch = await ended(client, batch)
    assert batch.plain()["request_counts"]["completed"] == 5


async def test_a_batch_whose_input_is_lost_fails(
    client: AsyncBatches, blobs: BlobStore, start_runner: StartRunner
) -> None:
    batch = await create(client, [request_line(1)])
    blobs.delete("00/files")
    async with start_runner():
        batch = await ended(client, batch)
    [error] = batch.plain()["errors"]["data"]
    assert (batch.state, error["code"]) == ("failed", "input_file_lost")


async def test_the_end_of_a_batch_is_told_to_the_outbox_of_a_tenant_that_listens(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    redis_client.hset(KEYS.hooks("default"), "on", 1)
    good, bad = await create(client, [request_line(1)]), await create(client, [b"bad"])
    with serving(redis_url):
        async with start_runner():
            for batch in (good, bad):
                await ended(client, batch)
    told = {fields[b"b"].decode(): fields for _, fields in redis_client.xrange(KEYS.outbox)}
    assert told[good.batch_id][b"s"] == b"completed" and told[bad.batch_id][b"s"] == b"failed"
    # Their lines' ends are not told beside it.
    assert len(told) == 2 == redis_client.xlen(KEYS.outbox)
    redis_client.delete(KEYS.hooks("default"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "30s"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"callback_url": "ftp://example.com/"}, "callback_url"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
    ],
)
async def test_a_batch_with_wrong_terms_is_refused(
    client: AsyncBatches, options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await create(client, [request_line(1)], **options)
    assert refused.value.field == field
    assert not (await client.batches()).items


async def test_batches_are_listed_the_newest_first(client: AsyncBatches) -> None:
    ids = [(await create(client, [request_line(1)])).batch_id for _ in range(3)]
    page = await client.batches(limit=2)
    assert [batch.batch_id for batch in page.items] == sorted(ids, reverse=True)[:2]
    assert page.has_more
    with pytest.raises(InvalidRequest):
        await client.batches(limit=101)


async def test_a_batch_of_another_purpose_or_without_input_is_refused(
    client: AsyncBatches,
) -> None:
    file = await upload(client, jsonl([request_line(1)]))
    with pytest.raises(InvalidRequest, match="endpoint"):
        await client.create_batch(input_file_id=file.file_id, endpoint="/v1/images")
    await client.delete_file(file.file_id)
    with pytest.raises(NoSuchObject):
        await client.create_batch(input_file_id=file.file_id, endpoint="/v1/completions")


async def test_an_ended_batch_cannot_be_cancelled(
    client: AsyncBatches, start_runner: StartRunner
) -> None:
    batch = await create(client, [b"bad"])
    async with start_runner():
        await ended(client, batch)
    with pytest.raises(WrongState, match="failed"):
        await client.cancel_batch(batch.batch_id)
    with pytest.raises(NoSuchObject):
        await client.cancel_batch("batch_0")


async def test_a_store_that_is_no_directory_serves_as_well(
    redis_client: redis.Redis, redis_url: str
) -> None:
    blobs = BlobStore("memory://a-bucket/prefix")
    runner = BatchRunner(redis_url, KEYS, blobs, FAST)
    async with AsyncBatches(redis_url, blobs=blobs) as client:
        redis_client.zadd(KEYS.active_batches, {"nonsense": 1, "a b c": 1})
        batch = await create(client, [request_line(n) for n in range(5)])
        task = asyncio.create_task(runner.run())
        with serving(redis_url):
            batch = await ended(client, batch)
        await end_tasks([task])
        output, errors = await outcome(client, batch)
    assert len(output) == 5 and not errors
    redis_client.delete(KEYS.active_batches)
