"""The broker dies and comes back; the worker waits for it and loses nothing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support import shard
from support.fake_engine import generate
from support.half_open import HalfOpenProxy
from support.shard import read_log
from support.valkey import require_server_binary
from support.wait import wait_until
from support.worker_rig import Rig, make_request, state_of
from tidemill.protocol.errors import BrokerUnavailable
from tidemill.protocol.functions import ensure_library
from tidemill.service.embedded_broker import EmbeddedBroker
from tidemill.service.redis import connect
from tidemill_gpuworker.shell.outbox import PublishPolicy
from tidemill_gpuworker.shell.registration import Registration

MAX_UNPUBLISHED = 10


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker.start(tmp_path, fsync="always", binary=require_server_binary()) as broker:
        yield broker


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[redis.Redis]:
    with connect(broker.url) as client:
        ensure_library(client)
        yield client


@pytest.fixture
def rig(broker: EmbeddedBroker, client: redis.Redis) -> Iterator[Rig]:
    policy = PublishPolicy(
        stream_seconds=0.002, slack_seconds=0.0, max_unpublished_tokens=MAX_UNPUBLISHED
    )
    config: dict[str, object] = {"policy": policy, "lease_seconds": 60.0}
    rig = Rig(client, broker.url, shard.lead(client), config=config)
    with rig.running():
        yield rig


def _kill(broker: EmbeddedBroker) -> None:
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: not broker.is_running, what="the broker is dead")


def test_the_engine_pauses_while_the_broker_is_away_and_loses_nothing(
    broker: EmbeddedBroker, client: redis.Redis, rig: Rig
) -> None:
    job_id = rig.give(make_request(num_tokens=100))
    rig.runner.allow(5)
    rig.wait_for_tokens(job_id, 5)
    _kill(broker)
    rig.runner.run_free()
    wait_until(lambda: rig.process._publisher.is_full, what="the publisher is full")
    assert len(rig.runner.plans) <= 5 + MAX_UNPUBLISHED + 1
    broker.restart()
    rig.wait_for(job_id, "done")
    log = read_log(client, job_id)
    assert (log.ids, log.terminals) == (generate([1, 2, 3], 100), ["done"])


def test_commands_sent_after_the_outage_are_read(
    broker: EmbeddedBroker, client: redis.Redis, rig: Rig
) -> None:
    _kill(broker)
    broker.restart()
    rig.runner.run_free()
    job_id = rig.give(make_request(num_tokens=5))
    rig.wait_for(job_id, "done")
    assert read_log(client, job_id).ids == generate([1, 2, 3], 5)


def test_a_connection_that_died_in_silence_costs_no_lease(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    with HalfOpenProxy(redis_url) as proxy:
        rig = Rig(redis_client, proxy.url, epoch, config={"lease_seconds": 5.0})
        rig.runner.run_free()
        with rig.running():
            rig.wait_for(rig.give(make_request()), "done")
            proxy.stall()
            job_id = rig.give(make_request((5, 6)), lease_ms=5_000)

            def is_done() -> bool:
                assert shard.reap(redis_client, job_id) == 0, "the lease ran out"
                return state_of(redis_client, job_id) == "done"

            wait_until(is_done, what="the job is done")
    log = read_log(redis_client, job_id)
    assert (log.ids, log.terminals) == (generate([5, 6], 8), ["done"])


def test_a_worker_that_cannot_say_goodbye_leaves_all_the_same(
    broker: EmbeddedBroker, client: redis.Redis, rig: Rig
) -> None:
    job_id = rig.give(make_request(num_tokens=100))
    rig.runner.allow(3)
    rig.wait_for_tokens(job_id, 3)
    _kill(broker)
    rig.drain.request()
    rig.drain.request()
    rig.runner.run_free()
    rig.join()
    assert rig.left_clean is False
    broker.restart()
    assert state_of(client, job_id) == "run"
    assert read_log(client, job_id).ids == generate([1, 2, 3], 3)


def test_a_worker_that_starts_while_the_broker_loads_its_data_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(_registration: Registration) -> None:
        # INFO is all that a loading server answers.
        raise redis.exceptions.BusyLoadingError("Valkey is loading the dataset in memory")

    monkeypatch.setattr(Registration, "register", loading)
    with pytest.raises(BrokerUnavailable, match="still loading"):
        rig.process.run(rig.drain)
