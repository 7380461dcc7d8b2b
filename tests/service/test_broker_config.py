"""What a server is told about memory, disk and its socket."""

import os
from pathlib import Path

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill.service import broker_config
from tidemill.service.broker_config import (
    default_max_memory_bytes,
    make_socket_directory,
    socket_path_of,
    socket_url,
)
from tidemill.service.fsync_probe import SLOW_FSYNC_SECONDS, measure_fsync_seconds, policy_for


def test_memory_is_a_quarter_of_the_machine_or_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(broker_config, "_CGROUP_LIMIT", limit)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert default_max_memory_bytes() == machine // 4
    limit.write_text("max\n")
    assert default_max_memory_bytes() == machine // 4
    limit.write_text("2147483648\n")
    assert default_max_memory_bytes() == 2147483648 // 4
    limit.write_text("1048576\n")
    assert default_max_memory_bytes() == 256 << 20


def test_a_socket_lies_in_the_data_directory_if_its_path_fits() -> None:
    assert socket_path_of(Path("/data")) == Path("/data/run/valkey.sock")
    longest = Path("/" + "d" * 86)
    assert len(str(socket_path_of(longest))) == 103
    assert socket_path_of(longest).is_relative_to(longest)


def test_long_directories_get_short_and_different_socket_paths() -> None:
    one, other = Path("/" + "d" * 87), Path("/" + "e" * 87)
    assert len(str(socket_path_of(one))) < 103
    assert socket_path_of(one) != socket_path_of(other)
    assert socket_path_of(one) == socket_path_of(one)


def test_a_length_is_counted_in_bytes_not_characters() -> None:
    assert not socket_path_of(Path("/" + "é" * 60)).is_relative_to(Path("/" + "é" * 60))


def test_a_socket_address_quotes_what_a_url_would_misread() -> None:
    assert socket_url(Path("/a b/c?d#e")) == "unix:///a%20b/c%3Fd%23e"


def test_a_socket_directory_is_closed_to_others_even_if_it_was_open(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o777)
    make_socket_directory(directory / "valkey.sock")
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_socket_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="another user"):
        make_socket_directory(tmp_path / "run" / "valkey.sock")


def test_a_socket_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="another user"):
        make_socket_directory(tmp_path / "run" / "valkey.sock")


def test_a_disk_is_measured_without_leaving_a_file(tmp_path: Path) -> None:
    assert measure_fsync_seconds(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


def test_only_a_fast_disk_syncs_every_write() -> None:
    assert policy_for(0.0001) == "always"
    assert policy_for(SLOW_FSYNC_SECONDS) == "everysec"
    assert policy_for(0.25) == "everysec"
