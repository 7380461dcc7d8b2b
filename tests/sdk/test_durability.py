"""At which level a job was accepted."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.twins import MakeTwin, Twin
from support.valkey import require_server_binary
from support.wait import wait_until
from tidemill import BrokerUnavailable, ConfigError
from tidemill._receipt import Fate, Receipt, ServerId, survey, triage
from tidemill.protocol import calls
from tidemill.protocol.calls import Measures, NewJob
from tidemill.protocol.functions import ensure_library, run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(client: redis.Redis, level: str) -> None:
    run_id = str(client.info("server")["run_id"])
    measures = Measures(0.0, 0.0, 0.0, 0, level, run_id)
    run(client, calls.measure(KEYS, measures))
    # No bound: an idle server has measured no rate.
    client.hset(KEYS.measures, "mb", "")


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[tuple[str, redis.Redis]]:
    """A server with a port, its address, and a replica of it."""
    binary, ports = require_server_binary(), [free_port(), free_port()]
    servers = [
        EmbeddedBroker.start(tmp_path / str(port), port=port, fsync="no", binary=binary)
        for port in ports
    ]
    with servers[0] as master, servers[1] as copy, connect(copy.url) as client:
        client.replicaof("127.0.0.1", str(ports[0]))
        with connect(master.url) as main:
            ensure_library(main)
            for server in (main, client):
                server.config_set("repl-diskless-sync-delay", 0)
            wait_until(lambda: main.info("replication")["connected_slaves"] == 1, 30)
        yield master.url, client


def test_before_a_leader_has_looked_the_level_is_unknown(producer: Twin, mill: FakeMill) -> None:
    job = producer.submit([1])
    assert job.durability == "unknown"
    assert producer.job(job.id).durability == "unknown"


@pytest.mark.parametrize("level", ["fsync", "fast", "none"])
def test_the_level_is_what_the_leader_has_measured(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, level: str
) -> None:
    measure(redis_client, level)
    assert producer.submit([1]).durability == level


@pytest.mark.parametrize("level", ["fsync", "fast", "", 1])
def test_a_level_that_is_the_servers_to_choose_is_refused(
    make_twin: MakeTwin, redis_url: str, level: Any
) -> None:
    with pytest.raises(ConfigError, match="must be None or 'replica'"):
        make_twin(redis_url, durability=level)


def test_without_a_replica_the_servers_own_level_is_told(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    measure(redis_client, "fast")
    producer = make_twin(redis_url, durability="replica", timeout=30.0)
    assert [job.durability for job in producer.submit_many([[1], [2]])] == ["fast", "fast"]


def test_a_job_that_a_replica_has_says_so(
    make_twin: MakeTwin, replica: tuple[str, redis.Redis]
) -> None:
    url, copy = replica
    with connect(url) as client:
        FakeMill(client)
    producer = make_twin(url, durability="replica")
    wait_until(lambda: producer.submit([1]).durability == "replica", 30, "an acknowledgement")
    job = producer.submit([2])
    assert job.durability == "replica"
    assert copy.exists(KEYS.job(job.id))


def test_a_job_that_a_promotion_lost_is_submitted_again(
    make_twin: MakeTwin, replica: tuple[str, redis.Redis]
) -> None:
    url, copy = replica
    with connect(url) as client:
        FakeMill(client)
        producer = make_twin(url)
        job = producer.submit([1])
        # The master becomes a replica of its copy, which never got the job, and master again.
        copy.replicaof("NO", "ONE")
        copy.flushall()
        client.replicaof("127.0.0.1", str(copy.config_get("port")["port"]))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", 30)
        assert not client.exists(KEYS.job(job.id))
        client.replicaof("NO", "ONE")
        assert job.status().state == "queued"


def receipt(accepted: ServerId) -> Receipt:
    job = NewJob(new_job_id(), GenerateRequest(model="m", prompt_ids=(1,)))
    return Receipt(job, created=True, durability="fast", server=accepted, fate=Fate(""))


@pytest.mark.parametrize(
    ("accepted", "now", "promoted", "is_lost"),
    [
        (("run1", "rep1"), ("run1", "rep1"), False, False),  # nothing happened
        (("run1", "rep1"), ("run2", "rep2"), False, True),  # a restart
        (("run1", "rep1"), ("run2", "rep2"), True, True),  # a promotion of another server
        (("run1", "rep1"), ("run1", "rep2"), True, True),  # demoted and promoted again
        (("run1", "rep1"), ("run1", "rep2"), False, False),  # its last replica left long ago
        (("", "rep1"), ("run1", "rep1"), False, False),  # nobody had looked at the server
        (("", "rep1"), ("run2", "rep2"), False, True),
        (("run0", "rep1"), ("run1", "rep1"), False, False),  # the leader looked before a restart
        (("run1", ""), ("run2", ""), False, True),  # a server that hides its history
        (("run1", ""), ("run1", ""), False, False),
        (("", ""), ("", ""), False, False),  # one that hides everything
    ],
)
def test_a_missing_job_is_lost_only_if_its_server_is_another_one(
    accepted: tuple[str, str], now: tuple[str, str], promoted: bool, is_lost: bool
) -> None:
    held = receipt(ServerId(*accepted))
    look = survey(KEYS, [held])
    info = {"run_id": now[0]}, {"master_replid": now[1], "master_replid2": 7 if promoted else 0}
    [problem], chosen = triage([held], look.parse([*info, 0]))
    assert ((problem is None), chosen) == (is_lost, [held] if is_lost else [])
    assert triage([held], look.parse([*info, 1])) == ([None], [])


def test_a_receipt_renewed_during_the_look_is_judged_by_what_it_said_before() -> None:
    held = receipt(ServerId("run1", "rep1"))
    look = survey(KEYS, [held])
    held.server = ServerId("run2", "rep2")
    found = look.parse([{"run_id": "run2"}, {"master_replid": "rep2"}, 0])
    assert triage([held], found) == ([None], [held])


def test_a_server_without_the_replicas_it_wants_is_waited_for(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    impatient, patient = make_twin(redis_url, timeout=0.2), make_twin(redis_url, timeout=30.0)
    redis_client.config_set("min-replicas-to-write", 1)
    timer = threading.Timer(0.5, redis_client.config_set, ("min-replicas-to-write", 0))
    try:
        with pytest.raises(BrokerUnavailable, match="too few replicas"):
            impatient.submit([1])
        timer.start()
        assert patient.submit([1]).is_new
    finally:
        timer.cancel()
        redis_client.config_set("min-replicas-to-write", 0)
