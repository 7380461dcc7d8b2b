"""The crash matrix, rows of the broker: killed, set back in time, replaced by its replica."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.actors import Troupe
from support.crash_stage import CrashStage
from support.forwarder import Forwarder
from support.recorder import plan_jobs
from support.shard import KEYS, server_ms
from support.valkey import require_server_binary, start_fast_server
from support.wait import wait_until
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.fsync_probe import FsyncPolicy
from tidemill.service.redis import connect

SetStage = Callable[..., CrashStage]

NUM_JOBS = 4
#: So slow that the broker can be caught in mid-generation.
SLOW_SECONDS = 0.05


def start_broker(directory: Path, fsync: FsyncPolicy, *, port: int | None = None) -> EmbeddedBroker:
    binary = require_server_binary()
    return EmbeddedBroker.start(directory, fsync=fsync, port=port, binary=binary)


def kill(broker: EmbeddedBroker) -> None:
    pid = broker.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not broker.is_running, what="the broker is dead")


def log_of(broker: EmbeddedBroker) -> Path:
    """The file that the broker appends every write to."""
    [path] = (broker.settings.data_dir / "appendonlydir").glob("*.incr.aof")
    return path


@pytest.fixture
def always(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with start_broker(tmp_path / "always", "always") as broker:
        yield broker


@pytest.fixture
def everysec(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with start_broker(tmp_path / "everysec", "everysec") as broker:
        yield broker


@pytest.fixture
def set_stage(troupe: Troupe) -> Iterator[SetStage]:
    """Makes stages around servers of the test's own; ``url`` is where the processes find them."""
    clients = []

    def make(broker: EmbeddedBroker, url: str = "") -> CrashStage:
        client = connect(broker.url)
        clients.append(client)
        ensure_library(client)
        return CrashStage(client, url or broker.url, troupe)

    yield make
    for client in clients:
        client.close()


def test_broker_killed_with_fsync_always_loses_nothing(
    set_stage: SetStage, always: EmbeddedBroker
) -> None:
    stage = set_stage(always)
    jobs = plan_jobs(2 * NUM_JOBS)
    stage.leader()
    stage.worker(step_seconds=SLOW_SECONDS)
    running = stage.producer(jobs[:NUM_JOBS])
    stage.wait_for_tokens(4, NUM_JOBS)
    waiting = stage.producer(jobs[NUM_JOBS:])
    stage.wait(lambda: len(stage.job_ids()) == len(jobs), "all are accepted")
    accepted = sorted(stage.job_ids())

    kill(always)
    always.restart()

    assert sorted(stage.job_ids()) == accepted
    stage.expect_success(running, waiting)
    stage.judge(jobs)


def test_broker_killed_in_the_midst_of_a_write_cuts_off_what_nobody_was_told(
    set_stage: SetStage, everysec: EmbeddedBroker
) -> None:
    stage = set_stage(everysec)
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(step_seconds=SLOW_SECONDS)
    producer = stage.producer(jobs)
    stage.wait_for_tokens(4, NUM_JOBS)

    kill(everysec)
    os.truncate(log_of(everysec), log_of(everysec).stat().st_size - 7)
    everysec.restart()

    stage.expect_success(producer)
    stage.judge(jobs)


def test_broker_that_lost_tokens_gets_them_again_from_the_worker(
    set_stage: SetStage, everysec: EmbeddedBroker
) -> None:
    stage = set_stage(everysec)
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(step_seconds=SLOW_SECONDS)
    producer = stage.producer(jobs)
    stage.wait_for_tokens(3, NUM_JOBS)
    size = log_of(everysec).stat().st_size
    stage.wait_for_tokens(8, NUM_JOBS)

    kill(everysec)
    os.truncate(log_of(everysec), size)
    everysec.restart()

    stage.expect_success(producer)
    stage.judge(jobs)
    assert stage.fences() == {1}, "the worker went on, nobody began anew"


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_broker_that_lost_accepted_jobs_gets_them_again_from_their_owner(
    set_stage: SetStage, everysec: EmbeddedBroker, num_tokens: int
) -> None:
    stage = set_stage(everysec)
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(step_seconds=SLOW_SECONDS)
    size = log_of(everysec).stat().st_size
    producer = stage.producer(jobs)
    stage.wait(lambda: len(stage.job_ids()) == NUM_JOBS, "all are accepted")
    stage.wait_for_tokens(num_tokens, NUM_JOBS)
    lost_at = server_ms(stage.client)

    kill(everysec)
    os.truncate(log_of(everysec), size)
    everysec.restart()

    stage.expect_success(producer)
    ids = stage.judge(jobs).values()
    assert all(int(stage.client.hget(KEYS.job(job_id), "ts")) > lost_at for job_id in ids)


def test_replica_takes_the_place_of_its_killed_master(set_stage: SetStage, tmp_path: Path) -> None:
    port = free_port()
    with (
        start_broker(tmp_path / "master", "no", port=port) as master,
        start_fast_server(tmp_path / "replica") as replica,
        Forwarder(str(master.settings.socket_path)) as forwarder,
    ):
        # Without it a master waits 5 s for more replicas.
        set_stage(master).client.config_set("repl-diskless-sync-delay", 0)
        stage = set_stage(replica, forwarder.url)
        stage.client.replicaof("127.0.0.1", port)
        stage.wait(
            lambda: stage.client.info("replication")["master_link_status"] == "up",
            "the replica has what its master has",
        )
        jobs = plan_jobs(NUM_JOBS)
        stage.leader()
        stage.worker(step_seconds=SLOW_SECONDS)
        producer = stage.producer(jobs)
        stage.wait_for_tokens(4, NUM_JOBS)

        kill(master)
        stage.client.replicaof("NO", "ONE")
        forwarder.move_to(str(replica.settings.socket_path))

        stage.expect_success(producer)
        stage.judge(jobs)
        assert stage.client.exists(KEYS.leader)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
