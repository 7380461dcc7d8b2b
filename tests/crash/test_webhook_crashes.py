"""The crash matrix, rows of webhooks: whoever dies, each end is delivered, always under one id."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import redis
import standardwebhooks

from crash import points
from support.actors import Actor
from support.crash_stage import NUM_JOBS, CrashStage
from support.hook_sink import HookSink, hook_sink
from support.recorder import plan_jobs
from support.shard import KEYS
from tidemill._link import Link
from tidemill_webhooks.admin import HookAdmin

PRIVATE = ("--allow-private-webhooks",)


@pytest.fixture
def sink() -> Iterator[HookSink]:
    with hook_sink() as sink:
        yield sink


@pytest.fixture
def secret(stage: CrashStage, sink: HookSink) -> Iterator[str]:
    """The secret of the tenant's endpoint, which is the receiver."""
    with closing(Link(stage.url, KEYS.shard, 10.0)) as link:
        endpoint = HookAdmin(link, KEYS, "default").add(sink.url, allow_private=True)
    yield endpoint.secrets[0].value


def hook_worker(stage: CrashStage, crash_at: str = "") -> Actor:
    """A worker of the queue that is there already."""
    before = stage.client.zcard(KEYS.hook_workers)
    worker = stage.troupe.start(
        "tidemill_webhooks.__main__:main",
        ["--redis-url", stage.url, *PRIVATE],
        crash_at=crash_at,
        name="hooks",
    )
    stage.wait(lambda: stage.client.zcard(KEYS.hook_workers) > before, "a worker of the queue")
    return worker


def lapse(client: redis.Redis) -> None:
    """Let every lease of an attempt be over, and every hand-over."""
    for raw in client.zrange(KEYS.due_deliveries, 0, -1):
        delivery = raw.decode()
        client.hdel(KEYS.delivery(delivery), "ln")
        client.zadd(KEYS.due_deliveries, {delivery: 1}, xx=True)


def mostly_slow(names: Sequence[str], quick: set[str]) -> list[Any]:
    """Parameters of a test of which only ``quick`` ones are always run."""
    marks = {name: () if name in quick else (pytest.mark.slow,) for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


def judge(stage: CrashStage, sink: HookSink, secret: str, job_ids: set[str]) -> None:
    """Every end was delivered, under one id each, and nothing else was."""
    expected = {job_id.replace("job_", "evt_") for job_id in job_ids}
    stage.wait(lambda: set(sink.ids) == expected, "a webhook for each end")
    stage.wait(lambda: stage.client.zcard(KEYS.due_deliveries) == 0, "nothing is due")
    assert stage.client.xlen(KEYS.outbox) == 0
    bodies: dict[str, set[bytes]] = {}
    for request in sink.received:
        payload = standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))
        assert payload["data"]["id"].replace("job_", "evt_") == request.headers["webhook-id"]
        bodies.setdefault(request.headers["webhook-id"], set()).add(request.body)
    assert all(len(sent) == 1 for sent in bodies.values()), "one end was told in two ways"
    for key in stage.client.scan_iter(KEYS.delivery("*")):
        assert stage.client.hget(key, "st") == b"delivered"


#: The others take as long and differ less.
LEADER_POINTS = mostly_slow(
    (*points.OUTBOX_POINTS, *points.ATTEMPT_POINTS),
    {*points.OUTBOX_POINTS, "webhooks.after_take", "webhooks.before_mark"},
)


@pytest.mark.parametrize("point", LEADER_POINTS)
def test_leader_dies_between_an_end_and_its_delivery(
    stage: CrashStage, sink: HookSink, secret: str, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    victim = stage.scheduler(crash_at=point, options=PRIVATE)
    producer = stage.producer(jobs)

    stage.expect_crash(victim)
    stage.scheduler(options=PRIVATE)
    lapse(stage.client)

    stage.expect_success(producer)
    judge(stage, sink, secret, set(stage.judge(jobs).values()))


@pytest.mark.parametrize("point", points.ENQUEUE_POINTS)
def test_leader_dies_while_it_leaves_an_attempt_to_the_queue(
    stage: CrashStage, sink: HookSink, secret: str, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    hook_worker(stage)
    victim = stage.scheduler(crash_at=point, options=PRIVATE)
    producer = stage.producer(jobs)

    stage.expect_crash(victim)
    stage.scheduler(options=PRIVATE)

    stage.expect_success(producer)
    judge(stage, sink, secret, set(stage.judge(jobs).values()))


@pytest.mark.parametrize("point", mostly_slow(points.ATTEMPT_POINTS, {"webhooks.before_mark"}))
def test_worker_of_the_queue_dies_in_the_midst_of_an_attempt(
    stage: CrashStage, sink: HookSink, secret: str, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    stage.scheduler(options=PRIVATE)
    stage.wait_for_epoch(1)
    victim = hook_worker(stage, crash_at=point)
    producer = stage.producer(jobs)

    stage.expect_crash(victim)
    stage.client.delete(KEYS.hook_workers)
    hook_worker(stage)
    stage.expect_success(producer)
    lapse(stage.client)

    judge(stage, sink, secret, set(stage.judge(jobs).values()))


def test_all_workers_of_the_queue_are_gone_and_the_leader_delivers_what_was_left_to_them(
    stage: CrashStage, sink: HookSink, secret: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    worker = hook_worker(stage)
    worker.pause()
    stage.scheduler(options=PRIVATE)
    stage.wait_for_epoch(1)
    producer = stage.producer(jobs)
    stage.expect_success(producer)
    stage.wait(
        lambda: stage.client.llen("tm:rq:queue:webhooks") >= NUM_JOBS - 1, "attempts in the queue"
    )
    assert not sink.received
    worker.kill()
    stage.client.delete(KEYS.hook_workers)
    lapse(stage.client)

    judge(stage, sink, secret, set(stage.judge(jobs).values()))


def test_a_worker_of_the_queue_that_is_asked_to_leave_says_goodbye(stage: CrashStage) -> None:
    worker = hook_worker(stage)
    worker.drain()
    assert worker.wait() == 0, worker.log
    assert stage.client.zcard(KEYS.hook_workers) == 0


@pytest.mark.slow
def test_nothing_is_lost_while_leaders_and_workers_are_killed_again_and_again(
    stage: CrashStage, sink: HookSink, secret: str
) -> None:
    jobs = plan_jobs(40)
    stage.worker()
    scheduler = stage.scheduler(options=PRIVATE)
    stage.wait_for_epoch(1)
    worker = hook_worker(stage)
    producer = stage.producer(jobs)
    for round_number in range(6):
        num_received = len(sink.received)
        stage.wait(
            lambda seen=num_received: len(sink.received) > seen or not producer.is_running,
            "deliveries go on",
        )
        standby = stage.scheduler(options=PRIVATE)
        scheduler.kill()
        scheduler = standby
        if round_number % 2:
            worker.kill()
            worker = hook_worker(stage)
        lapse(stage.client)
    stage.expect_success(producer)
    lapse(stage.client)

    judge(stage, sink, secret, set(stage.judge(jobs).values()))
    assert json.loads(sink.received[0].body)["object"] == "event"
