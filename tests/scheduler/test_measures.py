"""What the leader measures, and what submit makes of it."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import Claim, PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS, SchedulerProcess, StartScheduler
from support.shard import KEYS, cancel, submit
from support.wait import wait_until
from tidemill.protocol import calls
from tidemill.protocol.calls import Backlog, Measures, NewJob
from tidemill.protocol.errors import QueueFull
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest
from tidemill.service.redis import connect_async
from tidemill_scheduler.fleet.rates import MEMORY_SECONDS, Rate
from tidemill_scheduler.upkeep.limits import Limits, TenantWeights, make_limits, read_limits


def test_a_steady_stream_is_measured_exactly_from_the_first_second_on() -> None:
    rate = Rate()
    assert rate.per_second == 0.0

    for _ in range(5):
        rate.update(7, 1.0)
        assert rate.per_second == pytest.approx(7.0)


def test_a_rate_follows_a_change_within_its_memory() -> None:
    rate = Rate(100.0)

    for _ in range(round(MEMORY_SECONDS)):
        rate.update(0, 1.0)

    # exp(-1) of the old rate is left.
    assert rate.per_second == pytest.approx(36.79, abs=0.01)


def test_the_length_of_a_sample_makes_no_difference() -> None:
    often, seldom = Rate(3.0), Rate(3.0)

    for _ in range(10):
        often.update(1, 0.5)
    seldom.update(10, 5.0)

    assert often.per_second == pytest.approx(seldom.per_second)


@pytest.mark.parametrize(
    ("max_bytes", "max_result_bytes", "maxmemory", "limits"),
    [
        (None, None, 0, Limits(0, 0)),
        (None, None, 1000, Limits(500, 250)),
        (b"70", b"80", 1000, Limits(70, 80)),
        (b"70", b"80", 0, Limits(70, 80)),
        (b"0", b"0", 1000, Limits(0, 0)),
        (b"many", b"inf", 1000, Limits(500, 250)),
        (b"1e3", b"-5", 0, Limits(1000, 0)),
    ],
)
def test_a_setting_goes_before_the_share_of_the_memory(
    max_bytes: bytes | None, max_result_bytes: bytes | None, maxmemory: int, limits: Limits
) -> None:
    assert make_limits(max_bytes, max_result_bytes, maxmemory) == limits


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


@pytest.fixture
def memory_bound(redis_client: redis.Redis) -> Iterator[int]:
    bound = 1 << 30
    redis_client.config_set("maxmemory", bound)
    yield bound
    redis_client.config_set("maxmemory", 0)


async def test_the_limits_are_read_off_the_server(
    client: redis.asyncio.Redis, redis_client: redis.Redis, memory_bound: int
) -> None:
    redis_client.hset(KEYS.settings, "result_bytes", 12345)

    assert await read_limits(client, KEYS) == Limits(memory_bound // 2, 12345)


def submit_bytes(client: redis.Redis, num_bytes: int) -> str:
    request = GenerateRequest(model="m", prompt="x" * num_bytes)
    return run(client, calls.submit(KEYS, calls.NewJob(new_job_id(), request))).job_id


def test_no_bound_on_bytes_is_no_bound(redis_client: redis.Redis) -> None:
    ids = [submit(redis_client)]
    run(redis_client, calls.measure(KEYS, Measures(0.0, 0.0, 0.0, 0, "fsync", "r1")))

    ids += [submit_bytes(redis_client, 100_000) for _ in range(2)]

    for job_id in ids:
        cancel(redis_client, job_id)


def test_a_bound_on_bytes_refuses_until_it_has_room_at_the_measured_rate(
    redis_client: redis.Redis,
) -> None:
    job_id = submit(redis_client)
    run(redis_client, calls.measure(KEYS, Measures(0.0, 0.0, 10_000.0, 50_000, "fsync", "r1")))

    with pytest.raises(QueueFull) as full:
        submit_bytes(redis_client, 100_000)

    assert full.value.retry_after_seconds == pytest.approx(5, abs=0.2)
    cancel(redis_client, job_id)


def test_the_leader_tells_rates_durability_and_server(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = PuppetWorker(redis_client)
    wait_until(lambda: redis_client.hget(KEYS.measures, "lv"), LIVENESS_SECONDS)
    redis_client.config_set("appendfsync", "always")
    redis_client.hset(KEYS.settings, "bytes", 1_000_000)

    def measured() -> bool:
        # Only a busy second is a measure of the throughput.
        submit(redis_client)
        worker.work_off()
        return float(redis_client.hget(KEYS.measures, "rj") or 0) > 0

    wait_until(measured, LIVENESS_SECONDS)
    wait_until(lambda: redis_client.hget(KEYS.measures, "mb") == b"1000000", LIVENESS_SECONDS)

    level, run_id = redis_client.hmget(KEYS.measures, "lv", "rid")
    assert level == b"fsync"
    assert run_id == redis_client.info("server")["run_id"].encode()
    receipt = run(
        redis_client,
        calls.submit(
            KEYS, calls.NewJob(new_job_id(), GenerateRequest(model="m", prompt_ids=(1,)), cost=1)
        ),
    )
    assert (receipt.durability, receipt.run_id) == ("fsync", run_id.decode())
    wait_until(lambda: worker.work_off() is not None and not redis_client.zcard(KEYS.running))


async def test_weights_are_read_from_among_all_settings(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    others = {f"{name}:t{n}": n for n in range(2_000) for name in ("jobs", "rpm")}
    redis_client.hset(KEYS.settings, mapping=others)
    redis_client.hset(KEYS.settings, mapping={f"weight:t{n}": "0.5" for n in range(3_000)})
    redis_client.hset(KEYS.settings, mapping={"weight:red": "2.5", "weight:t7": "none"})
    weights = TenantWeights()
    assert weights("red") == 1.0

    await weights.refresh(client, KEYS)

    assert [weights(tenant) for tenant in ("red", "t1", "t2999", "t7", "blue")] == [
        2.5,
        0.5,
        0.5,
        1.0,
        1.0,
    ]
    redis_client.hset(KEYS.settings, "weight:*", "3")
    redis_client.hdel(KEYS.settings, "weight:red")
    await weights.refresh(client, KEYS)
    assert (weights("red"), weights("t1")) == (3.0, 0.5)


def submit_as(client: redis.Redis, tenant: str, priority: int = 0, cost: int = 1) -> int | None:
    """Submit a job; returns its estimated wait."""
    request = GenerateRequest(model="m", prompt_ids=(1,), tenant=tenant, priority=priority)
    run(client, calls.salt(KEYS, tenant=tenant, random=b"\x07" * 16))
    job = NewJob(new_job_id(), request, cost=cost, max_output=1)
    return run(client, calls.submit(KEYS, job)).wait_ms


def told(client: redis.Redis) -> Backlog | None:
    seconds, _ = client.time()
    return Backlog.read(client.hget(KEYS.measures, "bk"), int(seconds) * 1000)


def work_until_idle(client: redis.Redis, worker: PuppetWorker) -> None:
    def is_idle() -> bool:
        worker.work_off()
        return not (client.zcard(KEYS.active_queues) or client.zcard(KEYS.running))

    wait_until(is_idle, LIVENESS_SECONDS)


def test_the_leader_tells_what_waits(leader: SchedulerProcess, redis_client: redis.Redis) -> None:
    for tenant, priority in (("red", 0), ("red", 0), ("blue", 0), ("red", 5)):
        submit_as(redis_client, tenant, priority, cost=7)

    def seen() -> Backlog | None:
        backlog = told(redis_client)
        return backlog if backlog and sum(backlog.num_jobs_by_class) == 4 else None

    backlog = wait_until(seen, LIVENESS_SECONDS)
    assert backlog is not None
    assert backlog.num_jobs_by_class == (0, 3, 1)
    assert backlog.num_tenants_by_class == (0, 2, 1)
    assert backlog.work_by_class == (0.0, 21.0, 7.0)
    # There is no worker that could tell how fast it is.
    assert submit_as(redis_client, "red") is None
    work_until_idle(redis_client, PuppetWorker(redis_client))


def finish_all(worker: PuppetWorker, claims: list[Claim]) -> None:
    while claims:
        assert worker.finish(claims.pop()).accepted
    worker.report()


def test_the_pace_at_which_jobs_end_while_others_wait_goes_into_the_estimate(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = PuppetWorker(redis_client, max_num_seqs=1)
    for _ in range(20):
        submit_as(redis_client, "red")
    last, held = told(redis_client), list[Claim]()

    def is_measured() -> bool:
        nonlocal last
        held.extend(worker.read())
        worker.beat()
        if told(redis_client) != last:
            # Two jobs a second, whatever a worker with these step times could do.
            finish_all(worker, held)
            last = told(redis_client)
        return last is not None and 0 < last.tokens_per_second < 100

    wait_until(is_measured, LIVENESS_SECONDS)
    wait_ms = submit_as(redis_client, "red")
    assert wait_ms is not None
    assert wait_ms > 1_000
    finish_all(worker, held)
    work_until_idle(redis_client, worker)


def test_a_new_leader_goes_on_from_the_known_pace_on_an_idle_shard(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    known = Measures(0.5, 50.0, 0.0, 0, "fsync", "r1", pace=0.5)
    run(redis_client, calls.measure(KEYS, known))
    start_scheduler()
    worker = PuppetWorker(redis_client)

    def has_rate() -> bool:
        worker.beat()
        backlog = told(redis_client)
        return backlog is not None and backlog.tokens_per_second > 0

    wait_until(has_rate, LIVENESS_SECONDS)
    backlog = told(redis_client)
    assert backlog is not None
    # Half a job of 1 + 100 tokens a second.
    assert backlog.tokens_per_second == pytest.approx(50.5)


def test_a_heavier_tenant_gets_more_of_the_workers(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    redis_client.hset(KEYS.settings, "weight:red", "3")
    for number in range(60):
        submit_as(redis_client, ("red", "blue")[number % 2], cost=2_000)
    start_scheduler()
    worker = PuppetWorker(redis_client, max_num_seqs=1)

    def work(num_jobs: int) -> bool:
        worker.work_off()
        return len(worker.claims) >= num_jobs

    wait_until(lambda: work(32), LIVENESS_SECONDS)
    tenants = [redis_client.hget(KEYS.job(job_id), "tn") for job_id in worker.job_ids[:32]]
    assert tenants.count(b"red") >= 20
    work_until_idle(redis_client, worker)
