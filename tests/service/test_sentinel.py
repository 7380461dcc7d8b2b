"""A master under Sentinel: who is connected survives its death."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from support.fake_engine import generate
from support.nodes import Node, free_port, node, served
from support.shard import read_log
from support.twins import TWINS, Twin
from support.wait import wait_until
from tidemill import Chunk, Producer
from tidemill.protocol.errors import BrokerUnavailable, BrokerUnsupported
from tidemill.service.redis import check_server, connect, connect_async, translate

pytestmark = pytest.mark.timeout(120)

MASTER = "mill"
NUM_TOKENS = 100


@dataclass(frozen=True)
class Group:
    """A master, its replica, and a sentinel that decides alone."""

    master: Node
    replica: Node
    sentinel: Node

    @property
    def url(self) -> str:
        """An address whose first sentinel does not exist."""
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}/{MASTER}"


@contextmanager
def sentinel_group(directory: Path) -> Iterator[Group]:
    quick = ("--repl-diskless-sync-delay", "0")
    with (
        node(directory / "master", *quick, "--appendonly", "yes") as master,
        node(directory / "replica", *quick, "--replicaof", f"127.0.0.1 {master.port}") as replica,
        node(directory / "sentinel", "--sentinel") as sentinel,
    ):
        wait_until(lambda: _has_replica(master), 20, "the replica is in sync")
        sentinel.ask("SENTINEL", "MONITOR", MASTER, "127.0.0.1", master.port, 1)
        sentinel.ask("SENTINEL", "SET", MASTER, "down-after-milliseconds", 1000)
        sentinel.ask("SENTINEL", "SET", MASTER, "failover-timeout", 4000)
        wait_until(lambda: _num_known_replicas(sentinel) == 1, 20, "the sentinel knows the replica")
        yield Group(master, replica, sentinel)


def _has_replica(master: Node) -> bool:
    with master.client() as client:
        replica = client.info("replication").get("slave0", {})
        return bool(replica.get("state") == "online")


def _num_known_replicas(sentinel: Node) -> int:
    replicas = sentinel.ask("SENTINEL", "REPLICAS", MASTER)
    assert isinstance(replicas, list)
    return sum(b"disconnected" not in b"".join(map(bytes, replica)) for replica in replicas)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with sentinel_group(tmp_path / "servers") as group:
        yield group


class Reader(threading.Thread):
    """Follows one job to its end."""

    def __init__(self, producer: Twin, job_id: str) -> None:
        super().__init__()
        self._stream = producer.stream(job_id)
        self.chunks: list[Chunk] = []

    def run(self) -> None:
        self.chunks.extend(self._stream)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]


def test_jobs_and_streams_outlive_the_death_of_the_master(group: Group, tmp_path: Path) -> None:
    prompts = [[number, 7] for number in range(1, 5)]
    with served(group.url, tmp_path, step_seconds=0.02) as [scheduler]:
        producers: list[Twin] = [make(group.url, timeout=30.0) for make in TWINS.values()]
        options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
        jobs = [producers[0].submit(prompt, **options).id for prompt in prompts]
        readers = [Reader(p, job_id) for p in producers for job_id in jobs]
        for reader in readers:
            reader.start()
        wait_until(lambda: all(reader.ids for reader in readers), 20, "all streams flow")
        with group.master.client() as master:
            # It waits for what this very connection has written, and for all that came before.
            master.set("tm:{00}:barrier", 1, px=60_000)
            assert master.wait(1, 20_000) == 1, "what was accepted is replicated"
        group.master.kill()

        results = [producers[1].result(job_id, timeout=60) for job_id in jobs]
        for reader in readers:
            reader.join(30)
        after = producers[0].submit(prompts[0], **options)
        assert after.result(timeout=30).token_ids == results[0].token_ids
        status = producers[1].status()
        assert (status.num_queued, status.num_running) == (0, 0)
        for producer in producers:
            producer.close()
        assert scheduler.process.poll() is None

    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == generate(prompt, NUM_TOKENS)
    for number, reader in enumerate(readers):
        assert reader.ids == list(results[number % len(jobs)].token_ids)
    with connect(group.url) as client:
        assert client.info("server")["tcp_port"] == group.replica.port
        for job_id in jobs:
            assert read_log(client, job_id).terminals == ["done"]


async def test_a_demoted_master_is_left_for_the_new_one(group: Group) -> None:
    with connect(group.url) as client, connect(group.url, retries=0) as impatient:
        async with connect_async(group.url) as async_client:
            for number, asked in enumerate((client, impatient)):
                asked.set(f"tm:{{00}}:{number}", 1, px=60_000)
            await async_client.ping()
            # Neither connection breaks: the old master only begins to refuse writes.
            group.replica.ask("REPLICAOF", "NO", "ONE")
            group.sentinel.ask("SENTINEL", "REMOVE", MASTER)
            group.sentinel.ask("SENTINEL", "MONITOR", MASTER, "127.0.0.1", group.replica.port, 1)
            group.master.ask("REPLICAOF", "127.0.0.1", group.replica.port)
            with pytest.raises(BrokerUnavailable, match="serves us no longer"), translate():
                impatient.set("tm:{00}:1", 2, px=60_000)
            assert client.set("tm:{00}:0", 2, px=60_000)
            assert await async_client.set("tm:{00}:2", 2, px=60_000)
            assert impatient.get("tm:{00}:0") == await async_client.get("tm:{00}:0") == b"2"
    with group.replica.client() as promoted:
        assert promoted.get("tm:{00}:2") == b"2"


def test_a_master_that_may_not_write_or_steps_down_counts_as_away(group: Group) -> None:
    def failure_of(action: Callable[[redis.Redis], object]) -> str:
        with (
            connect(group.url, retries=0) as client,
            pytest.raises(BrokerUnavailable) as failure,
            translate(),
        ):
            action(client)
        return failure.value.message

    group.master.ask("CONFIG", "SET", "min-replicas-to-write", 2)
    assert "NOREPLICAS" in failure_of(lambda client: client.set("tm:{00}:x", 1, px=1000))
    group.master.ask("CONFIG", "SET", "min-replicas-to-write", 0)
    told: list[str] = []

    def wait_for_commands(client: redis.Redis) -> object:
        return client.xread({"tm:{00}:w:x": "0-0"}, block=9000)

    reader = threading.Thread(target=lambda: told.append(failure_of(wait_for_commands)))
    reader.start()
    with group.master.client() as master:
        wait_until(lambda: master.info("clients")["blocked_clients"], what="the reader blocks")
        master.replicaof("127.0.0.1", group.replica.port)
    reader.join(30)
    assert len(told) == 1 and "UNBLOCKED" in told[0]


def test_what_sentinels_do_not_know_is_told_in_one_line(group: Group) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with (
        connect(f"redis+sentinel://{nobody}/{MASTER}", retries=0) as client,
        pytest.raises(BrokerUnavailable, match=f"a live master '{MASTER}': {nobody} says"),
    ):
        check_server(client)
    url = f"redis+sentinel://127.0.0.1:{group.sentinel.port}/other"
    with connect(url, retries=0) as client, pytest.raises(BrokerUnsupported, match="'other'") as no:
        check_server(client)
    assert "No such master" in no.value.one_line() and "master's name" in no.value.fix
    with Producer(url) as producer, pytest.raises(BrokerUnsupported, match="'other'"):
        producer.status()


def test_sentinels_and_the_master_have_credentials_of_their_own(group: Group) -> None:
    group.master.ask("ACL", "SETUSER", "tide", "on", ">m/1", "~*", "&*", "+@all")
    group.sentinel.ask("ACL", "SETUSER", "watch", "on", ">s", "+sentinel|master")
    group.sentinel.ask("ACL", "SETUSER", "default", "-@all", "+ping", "+acl", "+info")
    address = f"tide:m%2F1@127.0.0.1:{group.sentinel.port}/{MASTER}/0"
    with (
        connect(f"redis+sentinel://{address}", retries=0) as client,
        pytest.raises(BrokerUnsupported, match="permission") as refused,
    ):
        check_server(client)
    assert "m/1" not in refused.value.one_line() and "sentinel_username" in refused.value.fix
    known = "?sentinel_username=watch&sentinel_password=s"
    with connect(f"redis+sentinel://{address}{known}") as client:
        assert client.acl_whoami() == "tide"
