"""One term against a real server, in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS
from support.shard import KEYS, QUEUE, cancel, submit
from support.wait import wait_until_async
from tidemill.protocol import calls
from tidemill.protocol.codec import decode
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest, JobEnd
from tidemill.service.redis import connect_async
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers, TokenizerStore
from tidemill_scheduler import term
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.fleet.grace import Grace, Moment
from tidemill_scheduler.health import Health
from tidemill_scheduler.intake import intake
from tidemill_scheduler.leadership import Leadership
from tidemill_scheduler.tasks import end_tasks
from tidemill_scheduler.upkeep.job_life import JobLife


class ObservedHealth(Health):
    """Counts the turns of the loop and keeps the last word on work."""

    def __init__(self) -> None:
        super().__init__()
        self.num_beats = 0
        self.is_runnable = False

    def beat(self) -> None:
        """Note that the leader's loop turns."""
        super().beat()
        self.num_beats += 1

    def note_work(self, *, runnable: bool, num_dispatched: int) -> None:
        """Note whether work could run."""
        super().note_work(runnable=runnable, num_dispatched=num_dispatched)
        self.is_runnable = runnable


@pytest.fixture
def health() -> ObservedHealth:
    return ObservedHealth()


@pytest.fixture
async def leading(
    redis_client: redis.Redis, redis_url: str, health: ObservedHealth
) -> AsyncIterator[None]:
    """A term that runs while the test does."""
    async with leading_term(redis_url, health, Grace(1.0)):
        yield


@asynccontextmanager
async def leading_term(redis_url: str, health: Health, grace: Grace) -> AsyncIterator[None]:
    config = SchedulerConfig(redis_url, lease_seconds=1.0)
    async with connect_async(redis_url, retries=0) as client:
        leadership = Leadership(client, KEYS, "sch_test", lease_seconds=3.0)
        await leadership.acquire()
        tokenizers = AsyncRedisTokenizers(KEYS, TokenizerStore())
        task = asyncio.create_task(
            term.Term(client, KEYS, config, leadership, tokenizers, health, grace).run()
        )
        yield
        assert not task.done()
        await end_tasks([task])


class NotedGrace(Grace):
    """Tells whether it knows that the server is there again."""

    has_resumed = False

    def resume(self, run_id: str, now: Moment) -> None:
        """Note the first contact on a new connection."""
        super().resume(run_id, now)
        self.has_resumed = True


async def test_the_grace_knows_of_an_outage_before_anybody_judges_workers(
    redis_client: redis.Redis,
    redis_url: str,
    health: ObservedHealth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grace = NotedGrace(1.0)
    had_resumed = asyncio.get_running_loop().create_future()

    async def note(_: JobLife) -> None:
        had_resumed.set_result(grace.has_resumed)
        await asyncio.Event().wait()

    monkeypatch.setattr(JobLife, "run", note)
    async with leading_term(redis_url, health, grace):
        assert await had_resumed


def submit_text(client: redis.Redis) -> str:
    run(client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    request = GenerateRequest(model="unserved", prompt="x")
    return run(client, calls.submit(KEYS, calls.NewJob(new_job_id(), request))).job_id


async def test_text_jobs_count_towards_the_bound_on_waiting_jobs(
    redis_client: redis.Redis,
    health: ObservedHealth,
    monkeypatch: pytest.MonkeyPatch,
    leading: None,
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING", 2)
    ids = [submit_text(redis_client) for _ in range(2)]

    def num_read() -> int:
        return int(redis_client.xpending(KEYS.ingress(QUEUE), "sched")["pending"])

    await wait_until_async(lambda: num_read() == 2, LIVENESS_SECONDS)
    ids.append(submit_text(redis_client))
    num_beats = health.num_beats
    await wait_until_async(lambda: health.num_beats > num_beats + 2, LIVENESS_SECONDS)

    assert num_read() == 2
    for job_id in ids:
        assert cancel(redis_client, job_id) == (1, "cancelled")


async def test_a_prompt_that_no_worker_can_hold_fails(
    redis_client: redis.Redis, leading: None
) -> None:
    PuppetWorker(redis_client, num_blocks=10)
    run(redis_client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    request = GenerateRequest(model="m", prompt_ids=(1,) * 161)
    job = calls.NewJob(new_job_id(), request, cost=161, idempotency_key="once")
    run(redis_client, calls.submit(KEYS, job))

    log = KEYS.token_log(job.job_id)
    await wait_until_async(lambda: redis_client.exists(log), LIVENESS_SECONDS)

    [(_, fields)] = redis_client.xrange(log)
    end = decode(fields[b"e"], JobEnd)
    assert (end.state, end.finish_reason) == ("failed", "error")
    assert "prompt: 161 tokens" in (end.error or "")
    assert "holds 160" in (end.error or "")
    await wait_until_async(lambda: not redis_client.zcard(KEYS.active_queues), LIVENESS_SECONDS)


async def test_work_for_workers_that_beat_and_say_nothing_is_a_stall(
    redis_client: redis.Redis, health: ObservedHealth, leading: None
) -> None:
    worker = PuppetWorker(redis_client, max_num_seqs=1)
    ids = [submit(redis_client) for _ in range(3)]
    await wait_until_async(worker.read, LIVENESS_SECONDS)
    # For a minute the two jobs are its own, and nothing happens that would wake the dispatcher.
    worker.beat()

    await wait_until_async(lambda: health.is_runnable, LIVENESS_SECONDS)

    num_beats = health.num_beats
    await wait_until_async(lambda: health.num_beats > num_beats + 2, LIVENESS_SECONDS)
    assert health.is_runnable
    assert len(worker.claims) == 2
    for job_id in ids:
        cancel(redis_client, job_id, worker.worker_id)
