"""The instruments of the chaos do to a connection what they say."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.client import Pipeline

from chaos import duplicates
from chaos.history import Recorder, read_history
from chaos.stage import Proxy
from support.valkey import start_fast_server
from support.wait import wait_until
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect

LONG = 30.0
COUNTING = """#!lua name=counting
redis.register_function('count_up', function(keys) return redis.call('INCR', keys[1]) end)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with start_fast_server(tmp_path_factory.mktemp("valkey")) as broker:
        yield broker


@pytest.fixture
def direct(broker: EmbeddedBroker) -> Iterator[redis.Redis]:
    with connect(broker.url) as client:
        client.flushall()
        client.function_load(COUNTING, replace=True)
        yield client


@pytest.fixture
def proxy(broker: EmbeddedBroker) -> Iterator[Proxy]:
    proxy = Proxy(broker.settings.socket_path)
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[redis.Redis]:
    with connect(proxy.url("worker"), timeout_seconds=0.5, retries=0) as client:
        client.ping()
        yield client


def fails(client: redis.Redis, key: str) -> bool:
    """Whether a write ends in an error."""
    try:
        client.set(key, "1")
    except redis.RedisError:
        return True
    return False


def first_failure(client: redis.Redis) -> str:
    """Write one key after the other until a write fails; returns its key."""
    return next(key for key in map(str, itertools.count()) if fails(client, key))


def test_a_lost_reply_leaves_a_write_that_its_sender_does_not_know_of(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.command("worker", "lose_replies", LONG)
    key = first_failure(client)
    wait_until(lambda: direct.exists(key))
    proxy.command("worker", "calm")
    wait_until(lambda: not fails(client, "a"))


def test_a_lost_request_leaves_nothing(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.command("worker", "lose_requests", LONG)
    assert not direct.exists(first_failure(client))


def test_a_held_request_arrives_after_its_sender_has_given_it_up(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.command("worker", "hold", 3.0)
    key = first_failure(client)
    assert not direct.exists(key)
    wait_until(lambda: direct.exists(key))


def test_a_half_open_connection_is_silent_while_new_ones_work(
    proxy: Proxy, client: redis.Redis
) -> None:
    proxy.command("worker", "half_open")
    with pytest.raises(redis.TimeoutError):
        while True:
            client.ping()
    assert client.ping()


def test_a_reset_breaks_the_connections_of_one_role_alone(
    proxy: Proxy, client: redis.Redis
) -> None:
    with connect(proxy.url("producer"), retries=1) as other:
        other_id, old_id = other.client_id(), client.client_id()
        proxy.command("worker", "reset")
        wait_until(lambda: not fails(client, "a") and client.client_id() != old_id)
        assert other.client_id() == other_id


@pytest.fixture
def duplicating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of this process is sent twice until the test ends."""
    for kind, name in (
        (redis.Redis, "_send_command_parse_response"),
        (redis.asyncio.Redis, "_send_command_parse_response"),
        (Pipeline, "_execute_pipeline"),
        (AsyncPipeline, "_execute_pipeline"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    duplicates.install(1.0, random.Random(1))


@pytest.mark.usefixtures("duplicating")
def test_calls_are_made_twice_and_other_commands_once(direct: redis.Redis) -> None:
    assert direct.fcall("count_up", 1, "calls") == 2
    assert direct.incr("commands") == 1
    with direct.pipeline(transaction=False) as pipe:
        pipe.fcall("count_up", 1, "calls")
        assert pipe.execute() == [4]
        pipe.fcall("count_up", 1, "calls")
        pipe.incr("commands")
        assert pipe.execute() == [5, 2]


@pytest.mark.usefixtures("duplicating")
async def test_asynchronous_calls_are_made_twice_as_well(
    broker: EmbeddedBroker, direct: redis.Redis
) -> None:
    async with redis.asyncio.Redis.from_url(broker.url) as client:
        assert await client.fcall("count_up", 1, "calls") == 2
        pipe = client.pipeline(transaction=False)
        pipe.fcall("count_up", 1, "calls")
        assert await pipe.execute() == [4]


def test_a_line_cut_short_by_the_death_of_its_writer_is_passed_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorder = Recorder(tmp_path / f"{name}.jsonl")
        recorder.record("something", n=name)
        recorder.close()
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "e": "hal')
    assert [event["n"] for event in read_history(tmp_path)] == ["a", "b"]
