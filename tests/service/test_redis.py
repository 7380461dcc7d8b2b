"""Connections: what they are set to, and how their failures are told."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import redis
from redis import exceptions

from support.valkey import start_fast_server
from tidemill.protocol.errors import BrokerUnavailable, ConfigError
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.broker_url import redact
from tidemill.service.redis import check_server, connect, connect_async, translate


def test_both_clients_return_bytes_and_carry_a_name(redis_url: str) -> None:
    async def ask() -> tuple[object, object]:
        async with connect_async(redis_url, client_name="async-one") as client:
            await client.set("key", "value", ex=10)
            return await client.get("key"), await client.client_getname()

    assert asyncio.run(ask()) == (b"value", "async-one")
    with connect(redis_url, client_name="sync-one") as client:
        assert (client.get("key"), client.client_getname()) == (b"value", "sync-one")


def test_an_unnamed_client_is_named_after_its_process(redis_url: str) -> None:
    with connect(redis_url) as client:
        assert client.client_getname() == f"tidemill-{os.getpid()}"


def test_a_write_survives_the_loss_of_its_connection(redis_client: redis.Redis) -> None:
    redis_client.client_kill_filter(_type="normal", skipme=False)
    assert redis_client.set("key", "value", ex=10)


def test_a_client_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    with start_fast_server(tmp_path) as broker, connect(broker.url) as client:
        client.set("key", "value")
        broker.restart()
        assert client.get("key") == b"value"


def test_a_silent_server_is_unavailable_in_bounded_time(tmp_path: Path) -> None:
    with start_fast_server(tmp_path) as broker:
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            with (
                connect(broker.url, timeout_seconds=0.2, retries=1) as client,
                pytest.raises(BrokerUnavailable) as failed,
                translate(),
            ):
                client.ping()
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    assert isinstance(failed.value.__cause__, exceptions.TimeoutError)


async def test_a_dead_server_is_unavailable_to_async_code_too(tmp_path: Path) -> None:
    with start_fast_server(tmp_path) as broker:
        url = broker.url
    async with connect_async(url, retries=0) as client:
        with pytest.raises(BrokerUnavailable, match="does not answer"), translate():
            await client.ping()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (exceptions.ConnectionError("refused"), "does not answer"),
        (exceptions.TimeoutError("slow"), "does not answer"),
        (exceptions.BusyLoadingError("LOADING"), "loading"),
        (exceptions.AuthenticationError("WRONGPASS"), "credentials"),
        (exceptions.ReadOnlyError("READONLY"), "does not answer"),
    ],
)
def test_every_sign_of_an_absent_server_is_broker_unavailable(error: Exception, words: str) -> None:
    with pytest.raises(BrokerUnavailable, match=words) as translated, translate():
        raise error
    assert translated.value.__cause__ is error
    assert translated.value.fix


@pytest.mark.parametrize("error", [exceptions.ResponseError("ERR"), FileNotFoundError("model")])
def test_other_errors_pass_untranslated(error: Exception) -> None:
    with pytest.raises(type(error)), translate():
        raise error


def test_a_server_tells_who_it_is(valkey_server: EmbeddedBroker) -> None:
    with connect(valkey_server.url) as client:
        info = check_server(client)
    assert info.name in ("Valkey", "Redis")
    assert info.pid == valkey_server.pid
    assert len(info.run_id) == 40


async def test_a_bad_url_is_refused_by_both_clients() -> None:
    for make in (connect, connect_async):
        with pytest.raises(ConfigError, match="not a broker address"):
            make("ftp://somewhere")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:1/0", "redis://***@host:1/0"),
        ("rediss://:p%40ss@host/0", "rediss://***@host/0"),
        ("unix:///run/s?password=secret", "unix:///run/s"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_addresses_are_shown_without_credentials(url: str, shown: str) -> None:
    assert redact(url) == shown
