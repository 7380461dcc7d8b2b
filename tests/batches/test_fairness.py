"""Batches of several tenants beside each other: none waits for all of another's or loses a line."""

import logging
import threading
from collections.abc import AsyncIterator

import pytest

from support.batch_shop import StartRunner, create, ended, outcome, request_line, serving
from support.fake_mill import Attempt
from support.wait import wait_until_async
from tidemill.batches import validation
from tidemill.batches.client import AsyncBatches
from tidemill.service.blobs.store import BlobStore

NUM_LINES, PART_LINES = 12, 4


@pytest.fixture
async def bob(
    client: AsyncBatches, redis_url: str, blobs: BlobStore
) -> AsyncIterator[AsyncBatches]:
    """Another tenant, with the same store."""
    async with AsyncBatches(redis_url, blobs=blobs, tenant="bob") as bob:
        yield bob


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "PART_LINES", PART_LINES)


class SlowMill:
    """Keeps jobs waiting until it is let go, but for those whose prompts have two tokens."""

    def __init__(self) -> None:
        self.held: list[Attempt] = []
        self.keys: list[str] = []
        self._may_go_on = threading.Event()

    def work(self, attempt: Attempt) -> None:
        self.keys.append(attempt.idempotency_key)
        if len(attempt.request.prompt_ids or ()) > 2 and not self._may_go_on.is_set():
            self.held.append(attempt)
        else:
            attempt.finish(1)

    def let_go(self) -> None:
        """Answer everything from now on; nothing is on its way to ``held``."""
        self._may_go_on.set()
        for attempt in self.held:
            attempt.finish(1)


async def test_a_batch_does_not_wait_for_the_long_ones_of_another_tenant(
    client: AsyncBatches, bob: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    mill = SlowMill()
    long = [await create(client, map(request_line, range(NUM_LINES))) for _ in range(3)]
    with serving(redis_url, mill.work):
        async with start_runner(max_batches=2, max_parts=1):
            await wait_until_async(lambda: len(mill.held) == 2 * PART_LINES)
            short = await ended(bob, await create(bob, [request_line(0, prompt=[1, 2])]))
            assert short.plain()["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            # It got the place of a batch that finishes its part beside it, and begins no other.
            assert len(mill.keys) == 2 * PART_LINES + 1
            mill.let_go()
            long = [await ended(client, batch) for batch in long]
    for batch in long:
        output, errors = await outcome(client, batch)
        assert sorted(line["custom_id"] for line in output) == sorted(
            f"id-{n}" for n in range(NUM_LINES)
        )
        assert not errors
    assert len(mill.keys) == len(set(mill.keys)) == 3 * NUM_LINES + 1


async def test_a_batch_that_has_given_its_place_back_can_be_cancelled(
    client: AsyncBatches, bob: AsyncBatches, redis_url: str, start_runner: StartRunner
) -> None:
    mill = SlowMill()
    long = [await create(client, map(request_line, range(NUM_LINES))) for _ in range(2)]
    with serving(redis_url, mill.work):
        async with start_runner(max_batches=2, max_parts=1):
            await wait_until_async(lambda: len(mill.held) == 2 * PART_LINES)
            await ended(bob, await create(bob, [request_line(0, prompt=[1, 2])]))
            for batch in long:
                await client.cancel_batch(batch.batch_id)
            long = [await ended(client, batch) for batch in long]
    for batch in long:
        assert batch.plain()["request_counts"] == {"total": 12, "completed": 0, "failed": 12}
        _, errors = await outcome(client, batch)
        assert sorted(line["custom_id"] for line in errors) == sorted(
            f"id-{n}" for n in range(NUM_LINES)
        )


async def test_with_one_place_the_tenants_take_turns(
    client: AsyncBatches,
    bob: AsyncBatches,
    redis_url: str,
    start_runner: StartRunner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mill = SlowMill()
    caplog.set_level(logging.INFO, logger="tidemill_scheduler.batches")
    long = await create(client, map(request_line, range(NUM_LINES)))
    with serving(redis_url, mill.work):
        async with start_runner(max_batches=1, max_parts=1, turn_seconds=0.1):
            await wait_until_async(lambda: len(mill.held) == PART_LINES)
            await ended(bob, await create(bob, [request_line(0, prompt=[1, 2])]))
            mill.let_go()
            long = await ended(client, long)
    output, errors = await outcome(client, long)
    assert len(output) == NUM_LINES and not errors
    assert len(mill.keys) == len(set(mill.keys)) == NUM_LINES + 1
    # It began no other part before it had its place again.
    assert f"{long.batch_id} has given its place back" in caplog.text


async def test_turns_of_a_few_lines_on_runners_that_come_and_go_lose_nothing(
    redis_url: str, blobs: BlobStore, start_runner: StartRunner
) -> None:
    mill = SlowMill()
    mill.let_go()
    tenants = [AsyncBatches(redis_url, blobs=blobs, tenant=name) for name in ("a", "b", "c")]
    batches = [
        (tenant, await create(tenant, map(request_line, range(NUM_LINES))))
        for tenant in tenants
        for _ in range(3)
    ]
    settings = {"max_batches": 2, "max_parts": 1, "turn_seconds": 0.02}
    with serving(redis_url, mill.work):
        async with start_runner(**settings):
            async with start_runner(**settings):
                await wait_until_async(lambda: len(mill.keys) > NUM_LINES)
            async with start_runner(**settings):
                batches = [(tenant, await ended(tenant, batch)) for tenant, batch in batches]
    for tenant, batch in batches:
        output, errors = await outcome(tenant, batch)
        assert sorted(line["custom_id"] for line in output) == sorted(
            f"id-{n}" for n in range(NUM_LINES)
        )
        assert not errors
        await tenant.close()
    assert len(mill.keys) == len(set(mill.keys)) == 9 * NUM_LINES
