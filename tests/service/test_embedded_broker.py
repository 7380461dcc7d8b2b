"""The embedded server: what it is told, what it refuses, what it survives."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from support.valkey import require_server_binary
from support.wait import wait_until
from tidemill.protocol.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    DataDirectoryInUse,
    PortInUse,
)
from tidemill.service.broker import EmbeddedBroker, running_broker_url
from tidemill.service.broker_binary import ServerBinary
from tidemill.service.data_lock import DataDirectoryLock
from tidemill.service.redis import connect

LAUNCHER = """
import sys, threading
from pathlib import Path
from tidemill.service.broker import EmbeddedBroker
broker = None
def start():
    global broker
    broker = EmbeddedBroker.start(Path(sys.argv[1]), fsync="no")
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(broker.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def binary() -> ServerBinary:
    return require_server_binary()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def start(data_dir: Path, **options: object) -> EmbeddedBroker:
    return EmbeddedBroker.start(data_dir, **{"fsync": "no", **options})  # type: ignore[arg-type]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def watcher_of(broker: EmbeddedBroker) -> psutil.Process:
    parent = psutil.Process(broker.pid).parent()
    assert parent is not None
    assert "deathwatch" in " ".join(parent.cmdline())
    return parent


def test_a_started_server_answers_on_its_private_socket_only(tmp_path: Path) -> None:
    with start(tmp_path) as broker, connect(broker.url) as client:
        assert client.ping()
        assert broker.version >= (7, 0, 0)
        assert broker.settings.tcp_url is None
        assert psutil.Process(broker.pid).net_connections("tcp") == []
        assert broker.settings.socket_path.parent.stat().st_mode & 0o777 == 0o700


def test_a_port_is_served_on_loopback_beside_the_socket(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, port=port) as broker:
        listening = psutil.Process(broker.pid).net_connections("tcp")
        assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", port)]
        assert broker.settings.tcp_url == f"redis://127.0.0.1:{port}/0"
        with connect(broker.settings.tcp_url) as client:
            assert client.ping()


def test_a_server_keeps_every_key_and_logs_every_write(tmp_path: Path) -> None:
    options = {"fsync": "always", "max_memory_bytes": 64 << 20}
    with start(tmp_path, **options) as broker, connect(broker.url) as client:
        settings = client.config_get("max*", "append*", "save", "stream*")
    assert settings["maxmemory"] == str(64 << 20)
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["save"] == ""
    assert settings["stream-node-max-bytes"] == "1024"


def test_a_full_server_comes_back_full(tmp_path: Path) -> None:
    with start(tmp_path, max_memory_bytes=64 << 20) as broker, connect(broker.url) as client:
        client.set("ballast", b"x" * (8 << 20))
    with start(tmp_path, max_memory_bytes=4 << 20) as broker, connect(broker.url) as client:
        assert client.strlen("ballast") == 8 << 20
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("more", b"y")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_stop_ends_server_and_watcher_and_frees_the_directory(tmp_path: Path) -> None:
    broker = start(tmp_path)
    pid, watcher = broker.pid, watcher_of(broker).pid
    broker.stop()
    broker.stop()
    assert is_gone(pid)
    assert is_gone(watcher)
    assert not broker.settings.socket_path.exists()
    start(tmp_path).stop()


def test_a_second_launcher_is_told_directory_and_holder(tmp_path: Path) -> None:
    with start(tmp_path) as broker:
        with pytest.raises(DataDirectoryInUse) as refused:
            start(tmp_path)
        assert str(tmp_path) in refused.value.message
        assert str(os.getpid()) in refused.value.message
        with connect(broker.url) as client:
            assert client.ping()


def test_a_used_port_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse) as refused:
            start(tmp_path / "data", port=port)
    assert str(port) in refused.value.message
    assert "--broker-port" in refused.value.fix
    assert not (tmp_path / "data" / "valkey.log").exists()
    start(tmp_path / "data").stop()


def test_an_impossible_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match="70000"):
        start(tmp_path, port=70000)


def test_the_server_dies_with_its_launcher_even_by_sigkill(
    launcher: tuple[subprocess.Popen[str], int],
) -> None:
    process, server = launcher
    assert not is_gone(server)
    process.kill()
    wait_until(lambda: is_gone(server))


def test_the_server_survives_the_thread_that_started_it(
    launcher: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    # The launcher's starting thread has ended before it prints the pid.
    _, server = launcher
    with pytest.raises(DataDirectoryInUse, match=str(launcher[0].pid)):
        start(tmp_path)
    assert not is_gone(server)


def test_a_directory_stays_locked_until_the_server_of_a_killed_launcher_is_gone(
    launcher: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    process, server = launcher
    os.kill(server, signal.SIGSTOP)
    process.kill()
    process.wait()
    with pytest.raises(DataDirectoryInUse, match=str(process.pid)):
        DataDirectoryLock(tmp_path).acquire(patience_seconds=0)
    os.kill(server, signal.SIGCONT)
    with start(tmp_path) as broker:
        assert is_gone(server)
        assert broker.pid != server


def test_the_server_dies_with_its_watcher(tmp_path: Path) -> None:
    with start(tmp_path) as broker:
        pid = broker.pid
        watcher_of(broker).kill()
        wait_until(lambda: is_gone(pid))
        assert not broker.is_running


def test_a_forked_child_does_not_keep_the_server_alive(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tidemill.service.broker import EmbeddedBroker
broker = EmbeddedBroker.start(Path({str(tmp_path)!r}), fsync="no")
child = os.fork()
if child == 0:
    os.close(1)  # the test reads to the end of our output
    signal.pause()
print(broker.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False
    )
    server, child = map(int, result.stdout.split())
    try:
        assert not is_gone(child)
        wait_until(lambda: is_gone(server))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_frozen_server_is_killed_after_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.service.server_process.STOP_GRACE_SECONDS", 0.2)
    broker = start(tmp_path)
    pid = broker.pid
    os.kill(pid, signal.SIGSTOP)
    broker.stop()
    assert is_gone(pid)
    assert not broker.settings.socket_path.exists()


@pytest.mark.parametrize("port_wanted", [False, True])
def test_acknowledged_writes_survive_kill_9_and_restart(tmp_path: Path, port_wanted: bool) -> None:
    port = free_port() if port_wanted else None
    with start(tmp_path, fsync="always", port=port) as broker:
        first, first_pid = broker.settings.tcp_url or broker.url, broker.pid
        with connect(first, retries=0) as client:
            for number in range(200):
                client.rpush("acknowledged", number)
            os.kill(first_pid, signal.SIGKILL)
            wait_until(lambda: not broker.is_running)
        broker.restart()
        assert broker.pid != first_pid
        with connect(first) as client:
            assert client.lrange("acknowledged", 0, -1) == [b"%d" % n for n in range(200)]


def test_a_write_cut_short_loses_only_itself(tmp_path: Path) -> None:
    with start(tmp_path, fsync="always") as broker, connect(broker.url) as client:
        client.set("first", "kept")
        client.set("second", "cut")
    [log] = (tmp_path / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 3)
    with start(tmp_path) as broker, connect(broker.url) as client:
        assert client.get("first") == b"kept"
        assert client.get("second") is None


def test_a_damaged_log_is_reported_with_the_servers_own_words(tmp_path: Path) -> None:
    with start(tmp_path, fsync="always") as broker, connect(broker.url) as client:
        client.set("key", "value")
    [log] = (tmp_path / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"this is not a log of commands\r\n" + log.read_bytes())
    with pytest.raises(BrokerUnavailable, match="Bad file format") as failed:
        start(tmp_path)
    assert "valkey.log" in failed.value.fix
    assert "\n" not in failed.value.one_line()


def test_a_server_that_is_killed_at_start_is_told_so_and_one_that_refuses_in_its_words(
    tmp_path: Path,
) -> None:
    def fail(script: str) -> BrokerUnavailable:
        program = tmp_path / "server"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        with pytest.raises(BrokerUnavailable) as failed:
            start(tmp_path, binary=ServerBinary(program, (7, 0, 0)))
        return failed.value

    stamp = "7:M 30 Nov 2026 13:36:00.123"
    killed = fail(f"echo '{stamp} * RDB is base AOF'; kill -9 $$")
    assert type(killed) is BrokerUnavailable and "ended at start by signal 9" in killed.message
    refused = fail(f"echo '{stamp} # Bad file'; echo '{stamp} * Ready to go'; exit 1")
    assert isinstance(refused, BrokerRefused) and refused.message.endswith("at start: Bad file")


def test_a_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    children = set(psutil.Process().children(recursive=True))
    broken = ServerBinary(Path(sys.executable), (7, 0, 0))
    with pytest.raises(BrokerUnavailable, match="exited at start"):
        start(tmp_path, binary=broken)
    assert set(psutil.Process().children(recursive=True)) == children
    start(tmp_path).stop()


def test_a_long_data_directory_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    with start(deep) as broker, connect(broker.url) as client:
        assert client.ping()
        assert not broker.settings.socket_path.is_relative_to(deep)
        socket_dir = broker.settings.socket_path.parent
        assert socket_dir.stat().st_mode & 0o777 == 0o700
    socket_dir.rmdir()


def test_a_data_directory_with_odd_characters_works(tmp_path: Path) -> None:
    odd = tmp_path / 'a b%20"c#'
    with start(odd) as broker, connect(broker.url) as client:
        assert client.ping()


def test_a_data_directory_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        start(tmp_path / "file")


def test_a_full_disk_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: Path) -> float:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tidemill.service.embedded_broker.measure_fsync_seconds", no_space)
    with pytest.raises(ConfigError, match="No space left"):
        start(tmp_path, fsync="auto")
    start(tmp_path).stop()


def test_an_interrupted_start_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: redis.Redis) -> None:
        raise KeyboardInterrupt

    children = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr("tidemill.service.embedded_broker._check_functions", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert set(psutil.Process().children(recursive=True)) == children


def test_the_self_test_leaves_no_function_behind(tmp_path: Path) -> None:
    with start(tmp_path) as broker, connect(broker.url) as client:
        assert client.function_list() == []


def test_a_running_server_is_found_by_its_data_directory(tmp_path: Path) -> None:
    assert running_broker_url(tmp_path) is None
    with start(tmp_path) as broker:
        assert running_broker_url(tmp_path) == broker.url
        os.kill(broker.pid, signal.SIGKILL)
        wait_until(lambda: not broker.is_running)
        assert running_broker_url(tmp_path) is None  # though its socket file is still there


def test_the_automatic_policy_follows_the_measured_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidemill.service.embedded_broker.measure_fsync_seconds", lambda _: 0.25)
    with start(tmp_path, fsync="auto") as broker:
        assert broker.durability == "fast"
    assert "250 ms" in caplog.text
    monkeypatch.setattr("tidemill.service.embedded_broker.measure_fsync_seconds", lambda _: 0.001)
    with start(tmp_path, fsync="auto") as broker:
        assert broker.durability == "fsync"
