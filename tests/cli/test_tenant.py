"""``tidemill tenant``."""

import json
from collections.abc import Callable

import pytest
import redis
from click.testing import Result as Outcome

from support.fake_mill import KEYS, FakeMill
from tidemill import ConfigError, InvalidRequest, Producer, QueueFull, RateLimited

Tidemill = Callable[..., Outcome]


def listed(tidemill: Tidemill) -> dict[str, dict[str, object]]:
    rows = json.loads(tidemill("tenant", "list", "--json").stdout)
    return {row["tenant"]: row for row in rows}


def test_limits_hold_as_soon_as_they_are_set(
    tidemill: Tidemill, producer: Producer, mill: FakeMill
) -> None:
    assert tidemill("tenant", "set", "default", "--max-jobs", "1").exit_code == 0
    producer.submit([1])
    with pytest.raises(QueueFull, match="already has 1 queued jobs"):
        producer.submit([1])
    tidemill("tenant", "set", "default", "--max-jobs", "9", "--requests-per-minute", "1")
    producer.submit([1])
    with pytest.raises(RateLimited, match="1 requests per minute"):
        producer.submit([1])


def test_limits_and_use_are_listed(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    producer.submit([1, 2], max_tokens=8)
    args = ["--max-bytes", "1000000", "--max-result-bytes", "5", "--tokens-per-minute", "7"]
    assert tidemill("tenant", "set", "*", *args).exit_code == 0
    args = ["--max-tokens", "0", "--back-door", "99", "--max-response-bytes", "4096"]
    assert tidemill("tenant", "set", "red", *args).exit_code == 0
    assert redis_client.hgetall(KEYS.settings) == {
        b"bytes": b"1000000",
        b"result_bytes": b"5",
        b"tpm:*": b"7",
        b"tokens:red": b"0",
        b"back:red": b"99",
        b"response_bytes:red": b"4096",
    }
    rows = listed(tidemill)
    assert list(rows) == ["*", "default", "red"]
    assert rows["*"]["max_bytes"] == 1_000_000
    assert (rows["default"]["queued_jobs"], rows["default"]["queued_tokens"]) == (1, 10)
    assert (rows["red"]["max_tokens"], rows["red"]["max_jobs"]) == (0, None)
    table = tidemill("tenant", "list").stdout
    assert "1,000,000" in table and "red" in table


def test_a_weight_is_set_listed_and_taken_away(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    assert tidemill("tenant", "set", "red", "--weight", "2.5").exit_code == 0
    assert tidemill("tenant", "set", "*", "--weight", "0.1").exit_code == 0
    assert redis_client.hgetall(KEYS.settings) == {b"weight:red": b"2.5", b"weight:*": b"0.1"}
    assert [row["weight"] for row in listed(tidemill).values()] == [0.1, 2.5]
    assert "2.5" in tidemill("tenant", "list").stdout
    assert tidemill("tenant", "unset", "red", "--weight").stdout == "1 taken away\n"
    assert list(listed(tidemill)) == ["*"]


@pytest.mark.parametrize("weight", ["0", "0.09", "100.1", "-1", "nan", "heavy"])
def test_a_weight_out_of_bounds_changes_nothing(
    tidemill: Tidemill, redis_client: redis.Redis, weight: str
) -> None:
    assert tidemill("tenant", "set", "red", "--weight", weight).exit_code != 0
    assert not redis_client.exists(KEYS.settings)


def test_a_weight_that_is_none_is_shown_as_invalid(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.settings, mapping={"weight:red": "1e1", "weight:blue": "101"})
    assert "invalid: 1e1" in tidemill("tenant", "list").stdout
    rows = listed(tidemill)
    assert (rows["red"]["invalid"], rows["red"]["weight"]) == ({"weight": "1e1"}, None)
    assert rows["blue"]["invalid"] == {"weight": "101"}


def test_limits_are_taken_away(tidemill: Tidemill, redis_client: redis.Redis) -> None:
    tidemill("tenant", "set", "red", "--max-jobs", "1", "--max-tokens", "2", "--back-door", "3")
    tidemill("tenant", "set", "*", "--max-bytes", "9")
    assert tidemill("tenant", "unset", "red", "max-jobs").stdout == "1 taken away\n"
    assert tidemill("tenant", "unset", "red").stdout == "2 taken away\n"
    assert tidemill("tenant", "unset", "red").stdout == "0 taken away\n"
    assert list(listed(tidemill)) == ["*"]
    assert tidemill("tenant", "unset", "*").stdout == "1 taken away\n"
    assert not redis_client.exists(KEYS.settings)


def test_limits_are_taken_away_by_the_options_that_set_them(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    tidemill("tenant", "set", "red", "--max-jobs", "1", "--max-tokens", "2", "--back-door", "3")
    outcome = tidemill("tenant", "unset", "red", "max-jobs", "--max-jobs", "--max-tokens")
    assert outcome.stdout == "2 taken away\n"
    assert redis_client.hgetall(KEYS.settings) == {b"back:red": b"3"}


@pytest.mark.parametrize(
    ("args", "kind", "says"),
    [
        (["set", "a b", "--max-jobs", "1"], InvalidRequest, "not a tenant"),
        (["set", "red"], ConfigError, "no limit is named"),
        (["set", "red", "--max-bytes", "1"], ConfigError, "of the whole shard"),
        (["set", "red", "--max-jobs", str(2**60)], ConfigError, "--max-jobs is 11529"),
        (["unset", "red", "max-fun"], ConfigError, "There are: max-jobs, max-tokens"),
        (["unset", "red", "max-bytes"], ConfigError, "--max-bytes is a bound of the whole shard"),
        (["unset", "red", "--max-bytes"], ConfigError, "of the whole shard"),
    ],
)
def test_a_bad_limit_is_told_and_changes_nothing(
    tidemill: Tidemill, redis_client: redis.Redis, args: list[str], kind: type, says: str
) -> None:
    outcome = tidemill("tenant", *args)
    assert isinstance(outcome.exception, kind)
    assert says in outcome.exception.one_line()
    assert not redis_client.exists(KEYS.settings)


def test_a_limit_below_zero_is_refused(tidemill: Tidemill, redis_client: redis.Redis) -> None:
    assert tidemill("tenant", "set", "red", "--max-jobs", "-1").exit_code == 2


@pytest.mark.leaks_keys
def test_settings_that_cannot_be_used_are_marked(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    bad = {b"jobs:red": "abc", b"rpm:red": "-5", b"tokens:red": "7", b"zzz": "1", b"jobs:\xff": "2"}
    redis_client.hset(KEYS.settings, mapping=bad)
    redis_client.hset(KEYS.counters, mapping={b"q:red": "abc", b"qt:red": "4", b"q:\xff": "1"})

    rows = listed(tidemill)

    assert rows["red"]["invalid"] == {"jobs": "abc", "rpm": "-5"}
    assert (rows["red"]["max_jobs"], rows["red"]["max_tokens"]) == (None, 7)
    assert (rows["red"]["queued_jobs"], rows["red"]["queued_tokens"]) == (0, 4)
    assert rows["*"]["invalid"] == {"zzz": "1", "jobs:\ufffd": "2"}
    table = tidemill("tenant", "list").stdout
    assert "invalid: abc" in table and "invalid: -5" in table and "zzz" in table
