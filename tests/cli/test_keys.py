"""``tidemill keys``: keys are told once, kept as digests, and end when they should."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import Result as Outcome

from support.shard import KEYS
from tidemill import ConfigError, InvalidRequest
from tidemill.access.api_keys import parse_token
from tidemill.access.pepper import make_pepper, read_pepper
from tidemill.cli.keys import duration
from tidemill.service.config import KeyConfig

Tidemill = Callable[..., Outcome]


def made(outcome: Outcome) -> dict[str, Any]:
    assert outcome.exit_code == 0, outcome.exception
    told: dict[str, Any] = json.loads(outcome.stdout)
    return told


def listed(tidemill: Tidemill, *args: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(tidemill("keys", "list", "--json", *args).stdout)
    return rows


def test_a_key_is_told_once_and_only_its_digest_is_kept(
    tidemill: Tidemill, redis_client: redis.Redis, tmp_path: Path
) -> None:
    args = ("--tenant", "acme", "--scope", "read", "--name", "ci", "--requests-per-minute", "9")
    key = made(tidemill("keys", "create", "--json", *args))
    token = parse_token(key["key"])
    assert token is not None and token.key_id == key["id"]
    secret = key["key"].removeprefix(f"tmk_{key['id']}_")
    stored = b"".join(redis_client.hgetall(KEYS.api_keys).values())
    assert secret.encode() not in stored and b"acme" in stored
    assert secret not in tidemill("keys", "list").stdout
    [row] = listed(tidemill)
    assert (row["tenant"], row["scopes"], row["name"]) == ("acme", ["read"], "ci")
    assert row["requests_per_minute"] == 9 and row["expires"] is None and row["used"] is None
    assert listed(tidemill, "--tenant", "other") == []
    pepper = tmp_path / "data" / "key_pepper"
    assert stat.S_IMODE(pepper.stat().st_mode) == 0o600
    assert pepper.read_bytes().strip() not in stored


def test_without_json_the_key_is_all_of_standard_output(tidemill: Tidemill) -> None:
    shown = tidemill("keys", "create")
    assert parse_token(shown.stdout.strip()) is not None


def test_a_rotated_key_lives_for_its_grace_and_the_new_one_allows_the_same(
    tidemill: Tidemill,
) -> None:
    old = made(tidemill("keys", "create", "--json", "--tenant", "acme", "--scope", "submit"))
    new = made(tidemill("keys", "rotate", old["id"], "--grace", "1h", "--json"))
    assert new["key"] != old["key"] and new["tenant"] == "acme" and new["scopes"] == ["submit"]
    assert new["expires"] is None
    first, second = listed(tidemill)
    assert first["id"] == old["id"] and first["expires"] > first["created"]
    assert second["id"] == new["id"]
    tidemill("keys", "rotate", new["id"], "--grace", "0s")
    assert isinstance(tidemill("keys", "rotate", new["id"]).exception, InvalidRequest)


def test_a_rotation_makes_no_key_live_longer(tidemill: Tidemill) -> None:
    old = made(tidemill("keys", "create", "--json", "--expires", "1m"))
    new = made(tidemill("keys", "rotate", old["id"], "--grace", "90d", "--json"))
    assert {row["expires"] for row in listed(tidemill)} == {old["expires"]} == {new["expires"]}


def test_a_revoked_key_leaves_nothing_behind(tidemill: Tidemill, redis_client: redis.Redis) -> None:
    key = made(tidemill("keys", "create", "--json", "--expires", "1m"))
    # As a rotation at the same time may leave it.
    redis_client.hset(KEYS.api_keys, "x:gone", "1")
    # The whole key is taken for its id.
    assert key["id"] in tidemill("keys", "revoke", key["key"]).stdout
    assert not redis_client.exists(KEYS.api_keys, KEYS.api_key_uses)
    assert isinstance(tidemill("keys", "revoke", key["id"]).exception, InvalidRequest)


def test_what_cannot_be_read_is_no_key(tidemill: Tidemill, redis_client: redis.Redis) -> None:
    for value in ("", "null", "[]", "7", '{"tenant": "a"}', '{"scopes": ["all"]}'):
        redis_client.hset(KEYS.api_keys, value, value)
    assert listed(tidemill) == []


@pytest.mark.parametrize(
    "args",
    [
        ("--scope", "everything"),
        ("--expires", "soon"),
        ("--expires", "-1d"),
        ("--tenant", "a b"),
        ("--name", "x" * 101),
        ("--name", "a\nb"),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(
    tidemill: Tidemill, redis_client: redis.Redis, args: tuple[str, ...]
) -> None:
    refused = tidemill("keys", "create", *args)
    assert isinstance(refused.exception, InvalidRequest | ConfigError)
    assert not redis_client.exists(KEYS.api_keys)


def test_lengths_of_time() -> None:
    assert [duration(text) for text in ("0s", "5m", "2h", "90d")] == [0, 300, 7200, 7_776_000]


def test_a_pepper_comes_from_the_environment_or_a_file_and_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pepper"
    with pytest.raises(ConfigError, match="no pepper"):
        read_pepper(KeyConfig("", path))
    made = make_pepper(KeyConfig("", path))
    assert len(made) == 64 and make_pepper(KeyConfig("", path)) == made
    assert [file.name for file in path.parent.iterdir()] == ["pepper"]
    assert read_pepper(KeyConfig("p" * 16, path)) == b"p" * 16
    with pytest.raises(ConfigError, match="shorter"):
        read_pepper(KeyConfig("short", path))
