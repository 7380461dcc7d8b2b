"""A cluster of three masters: shards live on different nodes, and may move."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.acl_server import ROLES, acl_lines
from support.fake_engine import generate
from support.nodes import Cluster, cluster, node, served, slot_of
from support.processes import sandbox
from support.scheduler_process import SchedulerProcess
from support.shard import read_log
from support.twins import TWINS, Twin
from support.wait import wait_until
from tidemill import AsyncProducer, Job, Producer
from tidemill._listener import LOST, Listener, Notice
from tidemill.protocol.errors import BrokerUnsupported, JobCancelled
from tidemill.protocol.ids import shard_for_tenant, shard_of
from tidemill.protocol.keys import ShardKeys
from tidemill.service.redis import check_server, connect

pytestmark = pytest.mark.timeout(120)

NUM_TOKENS = 100
OPTIONS = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
SHORT = {**OPTIONS, "max_tokens": 20}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture(scope="module")
def served_nodes(
    nodes: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SchedulerProcess]]:
    directory = tmp_path_factory.mktemp("processes")
    with served(nodes.url, directory, shards=("00", "01"), step_seconds=0.01) as schedulers:
        yield schedulers
        assert [scheduler.process.poll() for scheduler in schedulers] == [None, None]


def tenant_on(shard: str) -> str:
    """A tenant whose jobs go to a shard, of two."""
    return next(t for t in map("tenant{}".format, range(100)) if shard_for_tenant(t, 2) == shard)


@pytest.mark.usefixtures("served_nodes")
def test_two_tenants_are_served_on_two_nodes(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_SHARDS", "2")
    assert nodes.owner("00") != nodes.owner("01")
    for make in TWINS.values():
        with (
            make(nodes.url, tenant=tenant_on("00")) as first,
            make(nodes.url, tenant=tenant_on("01")) as second,
        ):
            _use(first, "00")
            _use(second, "01")
            _use_job_of_another_shard(first, second)
            for status in (first.status(), second.status()):
                assert (status.num_queued, status.num_running) == (0, 0)
    for shard in ("00", "01"):
        with connect(nodes.url, shard=shard) as client:
            assert client.info("server")["tcp_port"] == nodes.owner(shard).port


def _use(producer: Twin, shard: str) -> None:
    job = producer.submit([1, 2], **SHORT)
    assert shard_of(job.id) == shard
    chunks = list(producer.stream(job.id))
    assert [token for chunk in chunks for token in chunk.ids] == generate([1, 2], 20)
    results = list(producer.map([[3, number] for number in range(20)], **SHORT))
    for number, result in enumerate(results):
        assert list(result.token_ids) == generate([3, number], 20)
    assert len(producer.status().workers) == 1


def _use_job_of_another_shard(asker: Twin, owner: Twin) -> None:
    job_id = owner.submit([5], **SHORT).id
    assert len([token for chunk in asker.stream(job_id) for token in chunk.ids]) == 20
    assert list(asker.result(job_id, timeout=30).token_ids) == generate([5], 20)
    assert asker.job_status(job_id).state == "done"
    cancelled = owner.submit([6], **OPTIONS).id
    assert asker.cancel(cancelled) == "cancelled"
    with pytest.raises(JobCancelled):
        owner.result(cancelled, timeout=30)


@pytest.mark.usefixtures("served_nodes")
def test_a_stream_survives_that_its_shard_moves_to_another_node(nodes: Cluster) -> None:
    source = nodes.owner("00")
    target = next(node for node in nodes.nodes if node != source)
    with Producer(nodes.url, shard="00", timeout=30.0) as producer:
        job, stream = _begin(producer)
        nodes.move("00", target)
        assert nodes.owner("00") == target
        _check_end(nodes, producer, job, stream)
        with target.client() as client:
            bell = ShardKeys().bell
            wait_until(lambda: client.pubsub_shardchannels(bell), 20, "the scheduler listens there")


@pytest.mark.usefixtures("served_nodes")
def test_a_stream_survives_the_death_of_the_node_that_holds_it(nodes: Cluster) -> None:
    master = nodes.replicate("00")
    with Producer(nodes.url, shard="00", timeout=30.0) as producer:
        job, stream = _begin(producer)
        with master.client() as client:
            # It waits for what this very connection has written, and for all that came before.
            client.set("tm:{00}:barrier", 1, px=60_000)
            assert client.wait(1, 20_000) == 1, "what was accepted is replicated"
        master.kill()
        nodes.nodes.remove(master)
        _check_end(nodes, producer, job, stream)
    assert nodes.owner("00") == nodes.spare


class _Stream(threading.Thread):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self.ids: list[int] = []

    def run(self) -> None:
        for chunk in self._job.stream():
            self.ids.extend(chunk.ids)


def _begin(producer: Producer) -> tuple[Job, _Stream]:
    job = producer.submit([1, 2], **OPTIONS)  # type: ignore[arg-type]
    stream = _Stream(job)
    stream.start()
    wait_until(lambda: stream.ids, 20, "the stream flows")
    return job, stream


def _check_end(nodes: Cluster, producer: Producer, job: Job, stream: _Stream) -> None:
    expected = generate([1, 2], NUM_TOKENS)
    assert list(job.result(timeout=60).token_ids) == expected
    stream.join(30)
    assert stream.ids == expected
    with connect(nodes.url) as client:
        assert read_log(client, job.id).terminals == ["done"]
    assert len(producer.submit([1], **OPTIONS).result(timeout=30).token_ids) == NUM_TOKENS  # type: ignore[arg-type]


async def test_an_asynchronous_reader_hears_that_its_channel_has_moved(nodes: Cluster) -> None:
    source = nodes.owner("02")
    target = next(node for node in nodes.nodes if node != source)
    keys = ShardKeys("02")
    async with AsyncProducer(nodes.url, shard="02") as producer:
        reader = producer._links.home.listener.listen(keys.token_channel("job"))
        assert await reader.get(30)
        nodes.move("02", target)
        lost = await reader.get(30)
        assert lost is not None and not lost.channel, "a loss of everything"
        again = await reader.get(30)
        assert again is not None and again.channel == keys.token_channel("job")
    nodes.move("02", source)


def test_a_synchronous_reader_hears_that_its_channel_has_moved(nodes: Cluster) -> None:
    source = nodes.owner("03")
    target = next(node for node in nodes.nodes if node != source)
    channels = [ShardKeys("03").token_channel(name) for name in ("one", "two")]
    with connect(nodes.url, shard="03") as client, Listener(client) as listener:
        for channel in channels:
            listener.add(channel)
        assert {listener.get(30), listener.get(30)} == {Notice(channel) for channel in channels}
        # Leaving and coming back at once is no loss.
        listener.discard(channels[0])
        listener.add(channels[0])
        assert listener.get(30) == Notice(channels[0])
        nodes.move("03", target)
        assert listener.get(30) == LOST
        assert {listener.get(30), listener.get(30)} == {Notice(channel) for channel in channels}
    nodes.move("03", source)


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_ask_where_its_shard_is(nodes: Cluster, role: str) -> None:
    # A selector, in parentheses, is one word to the server.
    rules = re.findall(r"\([^)]*\)|\S+", acl_lines()[role])[2:]
    members = (*nodes.nodes, nodes.spare)
    for member in members:
        member.ask("ACL", "SETUSER", role, *rules, ">pw")
    url = nodes.url.replace("://", f"://{role}:pw@")
    for shard in ("00", "01", "02"):
        with connect(url, shard=shard) as client:
            locator = client.connection_pool.connection_kwargs["locator"]
            assert locator.find().port == nodes.owner(shard).port
    for member in members:
        member.ask("ACL", "DELUSER", role)


def test_the_commands_find_a_shard_of_a_cluster(nodes: Cluster, tmp_path: Path) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=nodes.url) as box:
        status = box.run("status", "--shard", "01", "--json")
        assert status.status == 0 and '"num_queued": 0' in status.stdout
        doctor = box.run("doctor", "--shard", "01", "--json")
        assert '"checks"' in doctor.stdout, doctor.stderr
        one_node = f"redis://127.0.0.1:{nodes.nodes[0].port}"
        elsewhere = next(s for s in ("00", "01", "02") if nodes.owner(s) != nodes.nodes[0])
        lost = box.run("status", "--shard", elsewhere, "--redis-url", one_node)
    assert lost.status == 1 and "redis+cluster://" in lost.error


def test_a_server_that_is_no_cluster_is_refused(tmp_path: Path) -> None:
    with node(tmp_path / "alone") as alone:
        url = f"redis+cluster://127.0.0.1:{alone.port}"
        with connect(url, retries=0) as client, pytest.raises(BrokerUnsupported) as refused:
            check_server(client)
    assert f"an owner of slot {slot_of('00')}" in refused.value.one_line()
    assert "redis://" in refused.value.fix
