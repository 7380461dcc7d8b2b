"""Faults of this program: in one line, and in a whole batch again and again."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import redis

from support.batch_shop import StartRunner, create, ended, outcome, request_line, serving
from support.fake_mill import Attempt
from support.shard import KEYS, server_ms
from support.wait import wait_until_async
from tidemill.async_client import AsyncProducer
from tidemill.batches import validation
from tidemill.batches.client import AsyncBatches
from tidemill.batches.openai_requests import OpenAITranslator
from tidemill.batches.translation import Translated
from tidemill.protocol.batches import Batch
from tidemill.service.blobs.store import BlobStore
from tidemill_scheduler.batches.batch_run import BatchRun
from tidemill_scheduler.batches.parts import Part


def odd_line(number: int, value: bytes) -> bytes:
    """A line of valid JSON whose body has a field that nothing here knows."""
    line = json.dumps(request_line(number, odd=0)).encode()
    return line.replace(b'"odd": 0', b'"odd": ' + value)


ODD = (b"18446744073709551616", b'"\\ud800"', b"[" * 260 + b"]" * 260, b'{"\\udfff": 1}')


async def test_a_line_with_a_value_that_nothing_can_hold_is_refused_and_the_others_run(
    client: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    lines = [request_line(0), *(odd_line(n, value) for n, value in enumerate(ODD, 1))]
    batch = await create(client, lines)
    with serving(redis_url):
        async with start_runner():
            batch = await ended(client, batch)
    told = batch.plain()
    assert told["status"] == "completed"
    assert told["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    _, errors = await outcome(client, batch)
    for line in errors:
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["param"].startswith("odd")


async def test_a_model_whose_name_is_no_unicode_is_the_fault_of_its_lines(
    client: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    batch = await create(client, [request_line(1, model="\ud800")])
    with serving(redis_url):
        async with start_runner():
            batch = await ended(client, batch)
    assert batch.plain()["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


def faulty(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this program fail at the line whose prompt ends with 2."""
    translate, submit_many = OpenAITranslator.translate, AsyncProducer.submit_many

    async def translate_badly(self: Any, endpoint: str, body: Mapping[str, Any]) -> Translated:
        if body["prompt"][-1] != 2:
            return await translate(self, endpoint, body)
        if where == "translation":
            raise RuntimeError("a fault")
        found = await translate(self, endpoint, body)
        answer: Any = (lambda results: 1 // 0) if where == "answer" else found.answer
        if where == "writing":
            answer = lambda results: {"text": object()}  # noqa: E731
        return Translated(found.specs, answer)

    async def submit_badly(self: Any, specs: Sequence[Any]) -> Any:
        if where == "submission" and any(spec.prompt[-1] == 2 for spec in specs):
            raise TypeError("a fault")
        return await submit_many(self, specs)

    monkeypatch.setattr(OpenAITranslator, "translate", translate_badly)
    monkeypatch.setattr(AsyncProducer, "submit_many", submit_badly)


@pytest.mark.parametrize("where", ["translation", "submission", "answer", "writing"])
async def test_an_unexpected_error_is_that_of_one_line(
    client: AsyncBatches,
    redis_url: str,
    start_runner: StartRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    faulty(where, monkeypatch)
    batch = await create(client, [request_line(n) for n in range(4)])
    with serving(redis_url):
        async with start_runner():
            batch = await ended(client, batch)
    told = batch.plain()
    assert told["status"] == "completed"
    assert told["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    _, [line] = await outcome(client, batch)
    assert line["custom_id"] == "id-2" and line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["code"] == "internal_error"
    logged = [record for record in caplog.records if "unexpected error" in record.message]
    assert len(logged) == 1 and logged[0].exc_info and "line 3" in logged[0].message


def failing_parts(monkeypatch: pytest.MonkeyPatch, tenant: str) -> None:
    """Make this program fail at the second part of each batch of a tenant, but at its end."""
    write_part = BatchRun._write_part
    give_up = BatchRun._give_up
    ending: set[int] = set()

    async def fail(self: Any, part: Part) -> None:
        if part.number == 1 and self._name.tenant == tenant and id(self) not in ending:
            await wait_until_async(lambda: 0 not in self._parts)
            raise OSError("a fault")
        await write_part(self, part)

    async def note(self: Any, reason: str) -> None:
        ending.add(id(self))
        await give_up(self, reason)

    monkeypatch.setattr(BatchRun, "_write_part", fail)
    monkeypatch.setattr(BatchRun, "_give_up", note)


async def test_batches_that_fail_again_and_again_hold_up_nobody_and_end(
    client: AsyncBatches,
    redis_url: str,
    blobs: BlobStore,
    start_runner: StartRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing_parts(monkeypatch, "default")
    monkeypatch.setattr(validation, "PART_LINES", 2)
    bad = [
        await create(client, [request_line(n) for n in range(4)], completion_window="1m")
        for _ in range(3)
    ]
    async with AsyncBatches(redis_url, blobs=blobs, tenant="bob") as bob:
        good = await create(bob, [request_line(1)])
        with serving(redis_url):
            async with start_runner(max_batches=2, max_faults=10**6):
                assert (await ended(bob, good)).state == "completed"
                assert not any([(await client.batch(b.batch_id)).state.is_terminal for b in bad])
            async with start_runner(max_batches=2, max_faults=2):
                bad = [await ended(client, batch) for batch in bad]
    for batch in bad:
        told = batch.plain()
        assert told["status"] == "failed" and told["failed_at"] is not None
        [error] = told["errors"]["data"]
        assert error["code"] == "batch_failed" and "OSError" in error["message"]
        # The lines of the part that could not be written had ended, and are in it.
        output, errors = await outcome(client, batch)
        assert sorted(line["custom_id"] for line in output) == [f"id-{n}" for n in range(4)]
        assert not errors


async def test_a_batch_that_fails_again_and_again_can_be_cancelled(
    client: AsyncBatches,
    redis_url: str,
    start_runner: StartRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(self: Any, batch: Batch) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(BatchRun, "_feed", fail)
    batch = await create(client, [request_line(n) for n in range(3)])
    with serving(redis_url):
        async with start_runner(max_faults=2):
            while (await client.batch(batch.batch_id)).state == "validating":
                await asyncio.sleep(0.02)
            await client.cancel_batch(batch.batch_id)
            batch = await ended(client, batch)
    assert batch.state == "cancelled"
    _, errors = await outcome(client, batch)
    assert [line["error"]["code"] for line in errors] == ["batch_cancelled"] * 3


@pytest.mark.leaks_keys
async def test_a_batch_that_waits_for_its_turn_is_cancelled_and_expires_at_once(
    client: AsyncBatches, redis_url: str, redis_client: redis.Redis, start_runner: StartRunner
) -> None:
    def work(attempt: Attempt) -> None:
        return  # the first batch keeps its place for as long as this test runs

    first = await create(client, [request_line(1)], completion_window="1m")
    with serving(redis_url, work):
        async with start_runner(max_batches=1):
            await wait_until_async(lambda: bool(redis_client.keys(KEYS.job("*"))))
            cancelled = await create(client, [request_line(2)])
            expired = await create(client, [request_line(3)])
            await client.cancel_batch(cancelled.batch_id)
            now = server_ms(redis_client)
            redis_client.hset(KEYS.batch_object("default", expired.batch_id), "xa", now)
            member = f"default {expired.batch_id}"
            redis_client.zadd(KEYS.active_batches, {member: now}, xx=True)
            cancelled, expired = await ended(client, cancelled), await ended(client, expired)
            first = await client.batch(first.batch_id)
    assert (cancelled.state, expired.state, first.state) == ("cancelled", "expired", "in_progress")
