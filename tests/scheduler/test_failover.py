"""Schedulers that die, pause, leave or lose their server."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import tidemill_scheduler.__main__
from support.puppet_worker import PuppetWorker
from support.scheduler_process import (
    LIVENESS_SECONDS,
    SchedulerProcess,
    StartScheduler,
    spawn_scheduler,
    wait_for_leader,
    wait_for_standby,
)
from support.shard import KEYS, QUEUE, expire_lease, submit
from support.valkey import start_fast_server
from support.wait import wait_until
from tidemill.cli.child import ERROR_PREFIX
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect
from tidemill.service.runtime import CRASH_STATUS


def num_pending(client: redis.Redis) -> int:
    return int(client.xpending(KEYS.ingress(QUEUE), "sched")["pending"])


def gather(worker: PuppetWorker, num: int) -> list[str]:
    """Let the worker work until it was given ``num`` jobs in all; returns them, sorted."""

    def enough() -> bool:
        worker.work_off()
        return len(worker.claims) >= num

    wait_until(enough, LIVENESS_SECONDS, f"not all of {num} jobs were dispatched")
    return sorted(worker.job_ids)


def test_a_standby_takes_over_what_a_killed_leader_had_read(
    leader: SchedulerProcess, redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    ids = [submit(redis_client) for _ in range(20)]
    wait_until(lambda: num_pending(redis_client) == 20, LIVENESS_SECONDS)
    start_scheduler()
    leader.kill()
    wait_for_leader(redis_client, above_epoch=1)

    worker = PuppetWorker(redis_client)

    assert gather(worker, 20) == sorted(ids)
    assert {claim.fence for claim in worker.claims} == {1}


def test_a_standby_does_not_wait_for_the_lease_of_a_killed_leader(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    worker = PuppetWorker(redis_client)
    # Longer than this test waits for anything.
    options = ("--leader-lease-seconds", "300")
    first = start_scheduler(options=options)
    wait_for_leader(redis_client)
    start_scheduler(options=options)
    wait_until(lambda: num_listening(redis_client) == 1, LIVENESS_SECONDS)
    wait_for_standby(redis_client)

    first.kill()
    killed_at = time.monotonic()
    job_id = submit(redis_client)
    assert gather(worker, 1) == [job_id]

    print(f"dispatched {time.monotonic() - killed_at:.2f} s after the leader was killed")
    assert redis_client.get(KEYS.epoch) == b"2"


def num_listening(client: redis.Redis) -> int:
    return int(client.execute_command("PUBSUB", "SHARDNUMSUB", KEYS.bell)[1])


def test_a_leader_that_was_paused_steps_down(
    leader: SchedulerProcess, redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    worker = PuppetWorker(redis_client)
    start_scheduler()
    leader.pause()
    early = [submit(redis_client) for _ in range(10)]
    wait_for_leader(redis_client, above_epoch=1)
    leader.resume()
    late = [submit(redis_client) for _ in range(10)]

    assert gather(worker, 20) == sorted(early + late)
    wait_until(lambda: "the scheduler starts over" in leader.log, LIVENESS_SECONDS)
    assert redis_client.get(KEYS.epoch) == b"2"
    last = submit(redis_client)
    assert last in gather(worker, 21)


def test_sigterm_hands_the_lead_to_a_standby(
    leader: SchedulerProcess, redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    start_scheduler()

    assert leader.drain() == 0

    wait_for_leader(redis_client, above_epoch=1)
    job_id = submit(redis_client)
    assert gather(PuppetWorker(redis_client), 1) == [job_id]


def test_a_drained_leader_leaves_no_lease_behind(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    assert leader.drain() == 0
    assert not redis_client.exists(KEYS.leader)


@pytest.mark.parametrize("point", ["after_read", "before_dispatch", "after_dispatch"])
def test_a_crash_while_jobs_go_out_loses_none_and_sends_none_twice(
    redis_client: redis.Redis, start_scheduler: StartScheduler, point: str
) -> None:
    worker = PuppetWorker(redis_client)
    crashing = start_scheduler(crash_at=f"scheduler.{point}")
    wait_for_leader(redis_client)
    ids = [submit(redis_client) for _ in range(10)]
    assert crashing.process.wait(LIVENESS_SECONDS) == CRASH_STATUS

    start_scheduler()

    assert gather(worker, 10) == sorted(ids)
    assert {claim.fence for claim in worker.claims} == {1}


@pytest.mark.parametrize("point", ["before_reap", "after_reap"])
def test_a_crash_while_reaping_requeues_each_job_once(
    redis_client: redis.Redis, start_scheduler: StartScheduler, point: str
) -> None:
    # Long enough that it has read all of them before the first one is taken back.
    dead = PuppetWorker(redis_client, lease_ms=10_000)
    crashing = start_scheduler(crash_at=f"scheduler.{point}")
    wait_for_leader(redis_client)
    ids = [submit(redis_client) for _ in range(3)]
    wait_until(lambda: (dead.read() and False) or len(dead.claims) == 3, LIVENESS_SECONDS)
    redis_client.zrem(KEYS.workers, dead.worker_id)
    assert crashing.process.wait(2 * LIVENESS_SECONDS) == CRASH_STATUS

    start_scheduler()
    heir = PuppetWorker(redis_client)

    assert gather(heir, 3) == sorted(ids)
    assert {claim.fence for claim in heir.claims} == {2}


def test_a_new_leader_gives_workers_a_whole_lease_to_beat(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    first = start_scheduler()
    silent = PuppetWorker(redis_client)
    job_id = submit(redis_client)
    wait_until(silent.read, LIVENESS_SECONDS)
    first.kill()
    expire_lease(redis_client, job_id)
    redis_client.zrem(KEYS.workers, silent.worker_id)
    lease_seconds = 4.0

    started = time.monotonic()
    start_scheduler(lease_seconds=lease_seconds)
    wait_until(lambda: not redis_client.zcard(KEYS.running), LIVENESS_SECONDS + lease_seconds)

    assert time.monotonic() - started >= lease_seconds
    assert gather(PuppetWorker(redis_client), 1) == [job_id]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with start_fast_server(tmp_path / "own") as server:
        yield server


def test_the_leader_survives_a_restart_of_the_server(
    own_server: EmbeddedBroker, tmp_path: Path
) -> None:
    scheduler = spawn_scheduler(own_server.url, tmp_path / "own.log")
    try:
        with connect(own_server.url) as client:
            ensure_library(client)
            wait_for_leader(client)
            waiting = submit(client)
            wait_until(lambda: num_pending(client) == 1, LIVENESS_SECONDS)
        own_server.restart()
        with connect(own_server.url) as client:
            later = submit(client)
            assert gather(PuppetWorker(client), 2) == sorted([waiting, later])
        assert scheduler.process.poll() is None
    finally:
        scheduler.kill()


def test_the_daemon_drains_while_the_server_is_away(
    own_server: EmbeddedBroker, tmp_path: Path
) -> None:
    scheduler = spawn_scheduler(own_server.url, tmp_path / "own.log")
    try:
        with connect(own_server.url) as client:
            wait_for_leader(client)
        own_server.stop()
        wait_until(lambda: "starts over" in scheduler.log, LIVENESS_SECONDS)
        assert scheduler.drain() == 0
    finally:
        scheduler.kill()


@pytest.mark.parametrize(
    ("options", "message", "status"),
    [
        (("--redis-url", "nonsense://x"), "is not a broker address", 2),
        (("--lease-seconds", "-1"), "lease_seconds is -1, but must be at least 0.5", 2),
        (("--leader-lease-seconds", "nan"), "leader_lease_seconds is nan", 2),
        (("--lease-seconds", "soon"), "--lease-seconds: invalid float value: 'soon'", 2),
        (("--nonsense",), "unrecognized arguments: --nonsense", 2),
        (("--redis-url", "unix://nobody:wrong@{address}"), "refused the credentials", 2),
        (("--metrics-port", "99999"), "the metrics port 99999", 1),
    ],
)
def test_wrong_settings_end_the_daemon_with_one_line(
    start_scheduler: StartScheduler,
    redis_url: str,
    options: tuple[str, ...],
    message: str,
    status: int,
) -> None:
    address = redis_url.partition("://")[2]
    scheduler = start_scheduler(options=tuple(o.format(address=address) for o in options))

    assert scheduler.process.wait(LIVENESS_SECONDS) == status
    lines = scheduler.log.splitlines()
    assert [line for line in lines if line.startswith(ERROR_PREFIX)] == lines[-1:]
    assert message in lines[-1]


def test_an_unexpected_error_ends_the_daemon_with_a_line_after_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tidemill_scheduler.__main__, "load_config", break_down)

    assert tidemill_scheduler.__main__.main([]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"{ERROR_PREFIX}unexpected ZeroDivisionError; see the log above"


def cut_scheduler_off(client: redis.Redis) -> None:
    """Break every connection of the scheduler, from the server's side."""
    for connection in client.client_list():
        if connection["name"] == "tidemill-scheduler":
            client.client_kill_filter(_id=connection["id"])


def test_dead_workers_lose_their_jobs_although_connections_break_within_every_lease(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    scheduler = start_scheduler(lease_seconds=2.0)
    dead = PuppetWorker(redis_client, lease_ms=2_000)
    job_id = submit(redis_client)
    wait_until(lambda: dead.beat() or dead.read(), LIVENESS_SECONDS)
    redis_client.zrem(KEYS.workers, dead.worker_id)
    next_cut = time.monotonic()

    def requeued() -> bool:
        nonlocal next_cut
        if time.monotonic() >= next_cut:
            cut_scheduler_off(redis_client)
            next_cut += 1.0
        return redis_client.hget(KEYS.job(job_id), "st") == b"queued"

    wait_until(requeued, LIVENESS_SECONDS)

    assert scheduler.log.count("starts over") >= 2
    assert gather(PuppetWorker(redis_client), 1) == [job_id]
