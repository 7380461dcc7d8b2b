"""Settings from the environment: defaults, values, and what a wrong one is answered with."""

from pathlib import Path

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill.service.config import load_config, load_crash_points, take_parent_fd


def test_an_empty_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config({})
    assert config.redis_url is None
    assert config.data_dir == Path("/home/somebody/.local/share/tidemill")
    assert config.cache_dir == Path("/home/somebody/.cache/tidemill")
    assert (config.shard, config.shard_of("anybody")) == ("00", "00")
    assert config.log_level == "INFO"
    assert (config.lease_seconds, config.beat_seconds) == (10.0, 3.0)


def test_every_variable_is_read(tmp_path: Path) -> None:
    config = load_config(
        {
            "TIDEMILL_REDIS_URL": "redis://broker:6379/1",
            "TIDEMILL_DATA_DIR": str(tmp_path / "data"),
            "TIDEMILL_CACHE_DIR": str(tmp_path / "cache"),
            "TIDEMILL_SHARD": "0f",
            "TIDEMILL_SHARDS": "256",
            "TIDEMILL_LOG_LEVEL": "debug",
            "TIDEMILL_LEASE_SECONDS": "4",
            "TIDEMILL_BEAT_SECONDS": "0.5",
        }
    )
    assert config.redis_url == "redis://broker:6379/1"
    assert (config.data_dir, config.cache_dir) == (tmp_path / "data", tmp_path / "cache")
    assert (config.shard, config.log_level) == ("0f", "DEBUG")
    assert (config.num_shards, config.shard_of("anybody")) == (256, "0f")
    assert (config.lease_seconds, config.beat_seconds) == (4.0, 0.5)


def test_the_xdg_directories_are_honoured_unless_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config({"XDG_DATA_HOME": "/data", "XDG_CACHE_HOME": "not/absolute"})
    assert config.data_dir == Path("/data/tidemill")
    assert config.cache_dir == Path("/home/somebody/.cache/tidemill")


def test_tenants_are_spread_over_the_shards_unless_one_is_set() -> None:
    config = load_config({"TIDEMILL_SHARDS": "2"})
    # CRC-16/XMODEM of "123456789" is 0x31c3, the check value in every catalogue of CRCs.
    assert config.shard_of("123456789") == "01"
    assert config.shard == "00"
    assert {config.shard_of(f"tenant{number}") for number in range(20)} == {"00", "01"}


def test_an_empty_variable_counts_as_unset() -> None:
    assert load_config({"TIDEMILL_REDIS_URL": " ", "TIDEMILL_SHARD": ""}).redis_url is None


def test_a_relative_directory_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config({"TIDEMILL_DATA_DIR": "here"}).data_dir == tmp_path / "here"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIDEMILL_SHARD", "000"),
        ("TIDEMILL_SHARD", "FF"),
        ("TIDEMILL_SHARDS", "0"),
        ("TIDEMILL_SHARDS", "257"),
        ("TIDEMILL_SHARDS", "two"),
        ("TIDEMILL_LOG_LEVEL", "LOUD"),
        ("TIDEMILL_LEASE_SECONDS", "soon"),
        ("TIDEMILL_LEASE_SECONDS", "-1"),
        ("TIDEMILL_BEAT_SECONDS", "nan"),
        ("TIDEMILL_BEAT_SECONDS", "inf"),
        ("TIDEMILL_DATA_DIR", "/dev/null"),
        ("TIDEMILL_CACHE_DIR", "/dev/null"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({variable: value})
    assert variable in refused.value.message
    assert value in refused.value.message
    assert variable in refused.value.fix


def test_a_beat_too_slow_for_the_lease_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 s does not fit twice") as refused:
        load_config({"TIDEMILL_BEAT_SECONDS": "6"})
    assert "TIDEMILL_BEAT_SECONDS" in refused.value.fix


def test_crash_points_are_names_with_an_optional_pass() -> None:
    points = load_crash_points({"TIDEMILL_CRASH_AT": "dispatch.after, append.before:3"})
    assert points == {"dispatch.after": 1, "append.before": 3}
    assert load_crash_points({}) == {}


@pytest.mark.parametrize("value", ["a:b", "a:0", ":2", "a,,b", "a:-1"])
def test_a_malformed_crash_point_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="TIDEMILL_CRASH_AT"):
        load_crash_points({"TIDEMILL_CRASH_AT": value})


def test_the_parents_descriptor_can_be_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_PARENT_FD", "17")
    assert take_parent_fd() == 17
    assert take_parent_fd() is None
