"""Readers and submitters outlast the death of the server."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_mill import FakeMill, text_of
from support.half_open import HalfOpenProxy
from support.twins import MakeTwin
from support.valkey import require_server_binary
from support.wait import wait_until
from tidemill import BrokerUnavailable, Chunk, _async_listener
from tidemill._async_listener import AsyncListener
from tidemill._listener import LOST, Notice
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect, connect_async


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A server of the test's own that syncs every write, so that killing it loses nothing."""
    binary = require_server_binary()
    with EmbeddedBroker.start(tmp_path / "broker", fsync="always", binary=binary) as broker:
        with connect(broker.url) as client:
            ensure_library(client)
        yield broker


def kill(broker: EmbeddedBroker) -> None:
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: not broker.is_running)


def test_a_stream_goes_on_over_restarts_of_the_server(
    make_twin: MakeTwin, broker: EmbeddedBroker
) -> None:
    producer = make_twin(broker.url, timeout=30.0)
    with connect(broker.url, retries=20) as client:
        mill = FakeMill(client)
        job_id = producer.submit([1]).id
        attempt = mill.claim()
        chunks: list[Chunk] = []
        thread = threading.Thread(target=lambda: chunks.extend(producer.stream(job_id)))
        thread.start()
        num_tokens = 0
        for _ in range(3):
            for _ in range(4):
                attempt.say()
            num_tokens += 4
            kill(broker)
            broker.restart()
        attempt.finish(1)
        thread.join()
    assert [token for chunk in chunks for token in chunk.ids] == list(range(13))
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(13)))


def test_a_result_is_waited_for_over_a_restart(make_twin: MakeTwin, broker: EmbeddedBroker) -> None:
    producer = make_twin(broker.url, timeout=30.0)
    with connect(broker.url, retries=20) as client:
        mill = FakeMill(client)
        job_id = producer.submit([1]).id
        attempt = mill.claim()
        tokens: list[int] = []
        thread = threading.Thread(
            target=lambda: tokens.extend(producer.result(job_id, 60).token_ids)
        )
        thread.start()
        attempt.say()
        kill(broker)
        broker.restart()
        attempt.finish(1)
        thread.join()
    assert tokens == [0, 1]


def test_a_submit_waits_for_a_server_that_comes_back(
    make_twin: MakeTwin, broker: EmbeddedBroker
) -> None:
    producer = make_twin(broker.url, timeout=60.0)
    with connect(broker.url, retries=20) as client:
        mill = FakeMill(client)
        producer.submit([1])
        mill.claim()
        kill(broker)
        restart = threading.Thread(target=broker.restart)
        restart.start()
        job_id = producer.submit([2]).id
        restart.join()
        assert mill.claim().job_id == job_id


def test_an_absence_longer_than_the_timeout_is_told_and_the_stream_can_be_resumed(
    make_twin: MakeTwin, broker: EmbeddedBroker
) -> None:
    producer = make_twin(broker.url, timeout=1.0)
    with connect(broker.url, retries=20) as client:
        mill = FakeMill(client)
        job_id = producer.submit([1]).id
        attempt = mill.claim()
        attempt.say(3)
        stream = producer.stream(job_id)
        assert next(stream).end == 3
        kill(broker)
        with pytest.raises(BrokerUnavailable):
            next(stream)
        stream.close()
        with pytest.raises(BrokerUnavailable):
            producer.submit([1])
        broker.restart()
        attempt.finish(1)
        resumed = producer.stream(job_id, after=stream.position)
        assert [chunk.ids for chunk in resumed] == [(3,)]


def test_an_accepted_job_whose_receipt_was_lost_is_found_by_its_key(
    make_twin: MakeTwin, broker: EmbeddedBroker
) -> None:
    producer = make_twin(broker.url, timeout=1.0)
    with connect(broker.url, retries=20) as client:
        mill = FakeMill(client)
        first = producer.submit([1], idempotency_key="k")
        kill(broker)
        with pytest.raises(BrokerUnavailable):
            producer.submit([1], idempotency_key="k")
        broker.restart()
        again = producer.submit([1], idempotency_key="k")
        assert (again.id, again.is_new) == (first.id, False)
        assert mill.claim().job_id == first.id


async def test_a_server_that_falls_silent_is_a_loss(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_async_listener, "_QUIET_SECONDS", 0.5)
    client = connect_async(broker.url, timeout_seconds=1.0, retries=0)
    listener = AsyncListener(client)
    reader = listener.listen("c")
    assert await reader.get(30) == Notice("c")
    os.kill(broker.pid, signal.SIGSTOP)
    assert await reader.get(30) == LOST
    os.kill(broker.pid, signal.SIGCONT)
    while (notice := await reader.get(30)) == LOST:
        pass
    assert notice == Notice("c")
    await listener.close()
    await client.aclose()


def test_a_connection_that_died_without_a_word_costs_one_try_only(
    redis_url: str, make_twin: MakeTwin
) -> None:
    with HalfOpenProxy(redis_url) as proxy:
        twin = make_twin(proxy.url, timeout=3)
        assert twin.status().num_queued == 0
        proxy.stall()
        assert twin.status().num_queued == 0
