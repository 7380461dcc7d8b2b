"""What an API key may submit in a minute."""

import pytest
import redis

from support.shard import KEYS
from tidemill.protocol.calls.access import Charged, KeyLimits, charge_key
from tidemill.protocol.functions import run


def charge(
    client: redis.Redis, limits: KeyLimits, *, requests: int = 0, tokens: int = 0
) -> Charged:
    call = charge_key(KEYS, key_id="k", limits=limits, requests=requests, tokens=tokens)
    return run(client, call)


def test_what_is_taken_is_told_with_what_is_left(redis_client: redis.Redis) -> None:
    limits = KeyLimits(requests=10, tokens=1000)
    assert charge(redis_client, limits, requests=1) == Charged(0, "", 9, 1000)
    taken = charge(redis_client, limits, tokens=600)
    assert (taken.requests_left, taken.tokens_left) == (9, pytest.approx(400, abs=20))


def test_what_lacks_is_told_with_the_time_until_it_is_there(redis_client: redis.Redis) -> None:
    limits = KeyLimits(requests=60, tokens=600)
    assert not charge(redis_client, limits, tokens=600).is_refused
    refused = charge(redis_client, limits, requests=1, tokens=10)
    assert (refused.is_refused, refused.lacking) == (True, "tokens")
    assert refused.wait_ms == pytest.approx(1000, abs=200)
    # Nothing of it was taken.
    assert refused.requests_left == 60
    assert charge(redis_client, limits, requests=1).requests_left == 59
    redis_client.hset(KEYS.key_bucket("k"), "r", 0)
    assert charge(redis_client, limits, requests=1).lacking == "requests"


def test_a_debt_refuses_requests_at_the_door_until_it_is_paid(redis_client: redis.Redis) -> None:
    limits = KeyLimits(tokens=600)
    assert charge(redis_client, limits, tokens=1800).tokens_left == -1200
    refused = charge(redis_client, limits, requests=1)
    assert refused.lacking == "tokens" and refused.wait_ms == pytest.approx(120_000, abs=1000)
    assert redis_client.pttl(KEYS.key_bucket("k")) == pytest.approx(180_000, abs=1000)


def test_tokens_come_back_also_into_a_debt_and_never_more_than_a_minutes(
    redis_client: redis.Redis,
) -> None:
    limits = KeyLimits(tokens=600)
    charge(redis_client, limits, tokens=1800)
    back = charge(redis_client, limits, tokens=-1500)
    assert not back.is_refused and back.tokens_left == pytest.approx(300, abs=10)
    assert charge(redis_client, limits, tokens=-5000).tokens_left == 600


def test_a_bound_of_nothing_lets_nothing_in(redis_client: redis.Redis) -> None:
    refused = charge(redis_client, KeyLimits(requests=0), requests=1)
    assert (refused.lacking, refused.wait_ms, refused.requests_left) == ("requests", 60_000, 0)
    assert refused.tokens_left is None
    unbound = charge(redis_client, KeyLimits(), requests=1, tokens=5)
    assert unbound == Charged(0, "", None, None)
