"""The broker is away for seconds: the worker waits for it without haste and then goes on."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from support import shard
from support.cpu import cpu_share
from support.fake_engine import generate
from support.fake_worker_process import fake_worker
from support.measured import MEASURED
from support.shard import KEYS, read_log
from support.valkey import require_server_binary
from support.wait import wait_until
from support.worker_rig import Rig, make_request, state_of, submit
from tidemill.protocol.functions import ensure_library
from tidemill.service.embedded_broker import EmbeddedBroker
from tidemill.service.redis import connect
from tidemill_gpuworker.shell.backoff import Backoff
from tidemill_gpuworker.shell.worker_process import ProcessConfig

pytestmark = pytest.mark.slow

NUM_JOBS = 6
POISON = 666
NUM_TOKENS = 120
#: Longer than the worker's lease and its patience for one reply.
AWAY_SECONDS = 4.0
#: Anything that does not wait takes a whole core.
MAX_CPU_SHARE = 0.25

Record = Callable[[str, object], None]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker.start(tmp_path, fsync="always", binary=require_server_binary()) as broker:
        yield broker


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[redis.Redis]:
    with connect(broker.url) as client:
        ensure_library(client)
        yield client


@contextmanager
def _killed(broker: EmbeddedBroker) -> Iterator[None]:
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: not broker.is_running, what="the broker is dead")
    yield
    broker.restart()


@contextmanager
def _stopped(broker: EmbeddedBroker) -> Iterator[None]:
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def _name(outage: Callable[..., object]) -> str:
    return outage.__name__.strip("_")


OUTAGES = pytest.mark.parametrize("outage", [_killed, _stopped])


@OUTAGES
def test_an_outage_under_load_loses_nothing_and_tells_nothing_twice(
    broker: EmbeddedBroker,
    client: redis.Redis,
    outage: Callable[[EmbeddedBroker], Iterator[None]],
    record_property: Record,
) -> None:
    epoch = shard.lead(client)
    prompts = [(number, number + 1) for number in range(1, NUM_JOBS + 1)]
    with fake_worker(broker.url) as (process, worker_id):
        jobs = [submit(client, make_request(p, num_tokens=NUM_TOKENS)) for p in prompts]
        for job_id in jobs:
            assert shard.dispatch(client, job_id, epoch, worker=worker_id).fence == 1
        wait_until(lambda: all(len(read_log(client, job_id).ids) > 5 for job_id in jobs))
        with outage(broker):
            share = cpu_share(process.pid, AWAY_SECONDS)
        for job_id in jobs:
            wait_until(lambda job_id=job_id: state_of(client, job_id) == "done", 20)  # type: ignore[misc]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    for job_id, prompt in zip(jobs, prompts, strict=True):
        log = read_log(client, job_id)
        assert (log.ids, log.terminals) == (generate(prompt, NUM_TOKENS), ["done"])
        assert client.hget(KEYS.job(job_id), "f") == b"1"
    record_property(MEASURED, f"worker under load, broker {_name(outage)}: {share:.1%} of a core")


@OUTAGES
def test_an_idle_worker_waits_for_its_broker_in_peace(
    broker: EmbeddedBroker,
    client: redis.Redis,
    outage: Callable[[EmbeddedBroker], Iterator[None]],
    record_property: Record,
) -> None:
    epoch = shard.lead(client)
    with fake_worker(broker.url) as (process, worker_id):
        before = cpu_share(process.pid, AWAY_SECONDS / 2)
        with outage(broker):
            away = cpu_share(process.pid, AWAY_SECONDS)
        job_id = submit(client, make_request())
        assert shard.dispatch(client, job_id, epoch, worker=worker_id).fence == 1
        wait_until(lambda: state_of(client, job_id) == "done", 20, "the worker is back")
    record_property(MEASURED, f"idle worker: {before:.1%} of a core; {_name(outage)}: {away:.1%}")
    assert max(before, away) < MAX_CPU_SHARE


def test_a_job_that_fails_during_an_outage_goes_back_after_it(
    broker: EmbeddedBroker, client: redis.Redis
) -> None:
    rig = Rig(client, broker.url, shard.lead(client), config={"lease_seconds": 60.0})
    with rig.running():
        job_id = rig.give(make_request((POISON, 2), num_tokens=50))
        rig.runner.allow(5)
        rig.wait_for_tokens(job_id, 5)
        with _killed(broker):
            rig.runner.allow(5)
            wait_until(lambda: len(rig.runner.plans) == 10 and rig.runner.waiting.is_set())
            rig.runner.poison = {POISON}
            rig.runner.run_free()
            wait_until(lambda: not rig.process._runner.has_work, what="the job is given up")
            assert len(rig.process._jobs) == 1
        rig.wait_for(job_id, "delayed")
        assert read_log(client, job_id).ids == generate((POISON, 2), 10)
        assert client.hget(KEYS.job(job_id), "rt") == b"1"
        rig.runner.poison = set()
        rig.retry(job_id)
        rig.wait_for(job_id, "done")
    assert read_log(client, job_id).ids == generate((POISON, 2), 50)


def test_a_worker_looks_for_its_broker_more_often_than_leases_end() -> None:
    for lease_seconds, expected in ((1.0, 0.25), (10.0, 2.0), (60.0, 2.0)):
        config = ProcessConfig(redis_url="redis://", lease_seconds=lease_seconds)
        assert config.max_delay_seconds == expected
    backoff = Backoff(0.25)
    assert [backoff.failed() for _ in range(5)] == [0.05, 0.1, 0.2, 0.25, 0.25]
    backoff.worked()
    assert backoff.failed() == 0.05
