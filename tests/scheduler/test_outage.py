"""The daemon without its broker for ten seconds, under load; and what it costs when idle."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.puppet_worker import PuppetWorker
from support.scheduler_process import (
    LIVENESS_SECONDS,
    SchedulerProcess,
    spawn_scheduler,
    wait_for_leader,
    wait_for_standby,
)
from support.shard import KEYS, submit
from support.valkey import start_fast_server
from support.wait import wait_until
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect

pytestmark = pytest.mark.slow

OUTAGE_SECONDS = 10.0
IDLE_SECONDS = 5.0

#: What waiting for a broker may take of a core beside other work; a busy loop takes all of it.
MAX_SHARE = 0.2

#: What a daemon may take that has nothing to do.
MAX_IDLE_SHARE = 0.02


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with start_fast_server(tmp_path / "own") as broker:
        with connect(broker.url) as client:
            ensure_library(client)
        yield broker


@pytest.fixture
def scheduler(server: EmbeddedBroker, tmp_path: Path) -> Iterator[SchedulerProcess]:
    process = spawn_scheduler(server.url, tmp_path / "own.log")
    yield process
    process.kill()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_of_core(pid: int, seconds: float) -> float:
    """Let a process be for a while; returns how much of a core it took meanwhile."""
    before, started = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)  # the length of the measurement, not a wait for anything
    return (cpu_seconds(pid) - before) / (time.monotonic() - started)


def work_off(worker: PuppetWorker, num: int) -> None:
    def enough() -> bool:
        worker.work_off()
        return int(worker.client.hget(KEYS.measures, "j") or 0) >= num

    wait_until(enough, 2 * LIVENESS_SECONDS, f"not all of {num} jobs ended")


def begin_load(client: redis.Redis) -> PuppetWorker:
    """Jobs that run, and some that wait."""
    wait_for_leader(client)
    worker = PuppetWorker(client, max_num_seqs=2)
    for _ in range(40):
        submit(client)
    wait_until(worker.read, LIVENESS_SECONDS)
    return worker


@pytest.mark.timeout(120)
def test_the_scheduler_survives_a_broker_that_stands_still(
    server: EmbeddedBroker, scheduler: SchedulerProcess
) -> None:
    with connect(server.url) as client:
        worker = begin_load(client)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            share = share_of_core(scheduler.process.pid, OUTAGE_SECONDS)
        finally:
            os.kill(server.pid, signal.SIGCONT)

        worker.beat()
        heir = PuppetWorker(client)
        work_off(heir, 30)

    print(f"{100 * share:.1f} % of a core while the broker stood still")
    assert share < MAX_SHARE
    assert scheduler.process.poll() is None


@pytest.mark.timeout(120)
def test_the_scheduler_survives_a_broker_that_is_killed_and_comes_back_with_its_data(
    server: EmbeddedBroker, scheduler: SchedulerProcess
) -> None:
    with connect(server.url) as client:
        begin_load(client)
    os.kill(server.pid, signal.SIGKILL)
    share = share_of_core(scheduler.process.pid, OUTAGE_SECONDS)
    server.restart()

    with connect(server.url) as client:
        work_off(PuppetWorker(client), 40)

    print(f"{100 * share:.1f} % of a core while the broker was away")
    assert share < MAX_SHARE
    assert scheduler.process.poll() is None


def test_an_idle_leader_and_an_idle_standby_take_almost_nothing(
    server: EmbeddedBroker, tmp_path: Path
) -> None:
    defaults = {"lease_seconds": 10.0, "options": ("--leader-lease-seconds", "3")}
    leader = spawn_scheduler(server.url, tmp_path / "leader.log", **defaults)
    with connect(server.url) as client:
        wait_for_leader(client)
        standby = spawn_scheduler(server.url, tmp_path / "standby.log", **defaults)
        try:
            PuppetWorker(client)
            wait_for_standby(client)
            leading = share_of_core(leader.process.pid, IDLE_SECONDS)
            standing_by = share_of_core(standby.process.pid, IDLE_SECONDS)
        finally:
            standby.kill()
            leader.kill()

    print(f"idle: leader {100 * leading:.1f} % of a core, standby {100 * standing_by:.1f} %")
    assert max(leading, standing_by) < MAX_IDLE_SHARE
