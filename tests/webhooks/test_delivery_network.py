"""What stands between a delivery and its receiver: addresses, names, certificates, answers."""

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import redis
import redis.asyncio

from support.deliveries import SETTINGS, end_job, make_due, post, view
from support.hook_sink import Answer, HookSink, hook_sink
from support.shard import KEYS
from support.tls import Authority
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.delivery import Deliverer
from tidemill_webhooks.http_post import MAX_BODY_BYTES
from tidemill_webhooks.settings import DeliverySettings


async def test_a_redirect_is_a_failure_and_not_followed(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    with hook_sink() as inner:
        sink.answer = lambda _: Answer(307, {"Location": inner.url})
        end_job(redis_client, sink.url)
        delivery = await post(client, admin)
        assert await deliverer.attempt(delivery.delivery_id) == "pending"
        assert len(sink.received) == 1 and not inner.received
    assert view(admin, delivery).attempts[0].status == 307


async def test_proxies_of_the_environment_are_not_used(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hook_sink() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        end_job(redis_client, sink.url)
        delivery = await post(client, admin)
        assert await deliverer.attempt(delivery.delivery_id) == "delivered"
        assert len(sink.received) == 1 and not proxy.received


@pytest.mark.parametrize("url", ["http://{host}", "https://{host}"])
async def test_a_receiver_on_our_side_is_never_reached_unless_that_is_allowed(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    url: str,
) -> None:
    end_job(redis_client, url.format(host=f"127.0.0.1:{sink.port}/"))
    delivery = await post(client, admin)
    guarded = Deliverer(client, KEYS, DeliverySettings())
    assert await guarded.attempt(delivery.delivery_id) == "failed"
    assert not sink.received


async def test_the_address_is_checked_again_at_each_attempt(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin
) -> None:
    answers = [["192.0.2.1"], ["127.0.0.1"]]
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    end_job(redis_client, "https://example.com/")
    delivery = await post(client, admin)
    guarded = Deliverer(client, KEYS, DeliverySettings(), resolve=resolve)
    for _ in answers:
        make_due(redis_client, delivery.delivery_id)
        assert await guarded.attempt(delivery.delivery_id) == "pending"
    assert asked == ["example.com"] * 2
    errors = {attempt.error for attempt in view(admin, delivery).attempts}
    assert errors == {"the host leads to an address that is not public"}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))


async def test_the_checked_address_is_connected_to_under_the_name_of_the_url(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    authority: Authority,
) -> None:
    num_asked = 0

    async def resolve(host: str, port: int) -> Sequence[str]:
        nonlocal num_asked
        num_asked += 1
        return ["127.0.0.1"]

    with hook_sink(authority) as sink:
        end_job(redis_client, sink.url)
        delivery = await post(client, admin)
        tls = trusting(authority)
        deliverer = Deliverer(client, KEYS, SETTINGS, resolve=resolve, tls=tls)
        assert await deliverer.attempt(delivery.delivery_id) == "delivered"
        [request] = sink.received
    assert request.server_name == "localhost" and num_asked == 1
    assert request.headers["host"] == f"localhost:{sink.port}"


@pytest.mark.parametrize("case", ["unknown authority", "another name"])
async def test_a_certificate_must_be_trusted_and_of_the_urls_name(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    authority: Authority,
    case: str,
) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    with hook_sink(authority) as sink:
        url = sink.url if case == "unknown authority" else sink.url.replace("localhost", "other")
        end_job(redis_client, url)
        delivery = await post(client, admin)
        tls = None if case == "unknown authority" else trusting(authority)
        deliverer = Deliverer(client, KEYS, SETTINGS, resolve=resolve, tls=tls)
        assert await deliverer.attempt(delivery.delivery_id) == "pending"
        assert not sink.received
    assert view(admin, delivery).attempts[0].error == "TLS: CERTIFICATE_VERIFY_FAILED"


async def test_a_second_address_is_tried_if_the_first_does_not_answer(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin, sink: HookSink
) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    deliverer = Deliverer(client, KEYS, SETTINGS, resolve=resolve)
    assert await deliverer.attempt(delivery.delivery_id) == "delivered"


async def test_a_receiver_that_never_answers_is_given_up_in_time(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin, sink: HookSink
) -> None:
    hold = threading.Event()
    sink.answer = lambda _: Answer(hold=hold)
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    hasty = Deliverer(client, KEYS, replace(SETTINGS, total_seconds=0.2))
    assert await hasty.attempt(delivery.delivery_id) == "pending"
    hold.set()
    assert view(admin, delivery).attempts[0].error == "no answer within 0.2 s"


@contextmanager
def raw_receiver(reply: bytes) -> Iterator[int]:
    """A server that says ``reply`` to anybody and keeps the connection open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def serve() -> None:
            try:
                connection, _ = listener.accept()
                connections.append(connection)
                connection.recv(65536)
                connection.sendall(reply)
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)
        for connection in connections:
            connection.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "state", "error"),
    [
        (HEAD + b"x" * (4 * MAX_BODY_BYTES), "delivered", ""),
        (HEAD + b"x", "delivered", ""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "delivered", ""),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "pending", "the answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, "pending", "the answer is not HTTP"),
    ],
    ids=["endless body", "hanging body", "continue", "no http", "endless header"],
)
async def test_a_receiver_cannot_hold_us_with_an_odd_answer(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    deliverer: Deliverer,
    reply: bytes,
    state: str,
    error: str,
) -> None:
    with raw_receiver(reply) as port:
        end_job(redis_client, f"http://127.0.0.1:{port}/")
        delivery = await post(client, admin)
        assert await deliverer.attempt(delivery.delivery_id) == state
    assert view(admin, delivery).attempts[0].error == error


async def test_nobody_listens(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    deliverer: Deliverer,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    end_job(redis_client, f"http://127.0.0.1:{port}/")
    delivery = await post(client, admin)
    assert await deliverer.attempt(delivery.delivery_id) == "pending"
    assert (
        view(admin, delivery).attempts[0].error == "the connection failed: ConnectionRefusedError"
    )


async def test_what_the_receiver_says_is_not_kept(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    sink.answer = lambda _: Answer(500, body=b"a secret of the inside")
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    await deliverer.attempt(delivery.delivery_id)
    stored = redis_client.hgetall(KEYS.delivery(delivery.delivery_id))
    assert not any(b"secret of the inside" in value for value in stored.values())
