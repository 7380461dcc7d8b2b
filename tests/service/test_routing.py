"""What sentinels and cluster nodes say, and whom to ask next."""

from typing import Any

import pytest
from redis import exceptions

from tidemill.protocol.errors import BrokerUnsupported
from tidemill.service.broker_url import Address
from tidemill.service.routing import ClusterRouting, Seeds, SentinelRouting, not_found

SEED = Address("seed", 1)


def master(**fields: str) -> list[bytes]:
    """A sentinel's reply about a master."""
    said = {"name": "mill", "ip": "10.0.0.1", "port": "6379", "flags": "master"} | fields
    return [word.encode() for pair in said.items() for word in pair]


def test_a_sentinel_tells_a_live_master() -> None:
    routing = SentinelRouting("mill")
    assert routing.question == ("SENTINEL", "MASTER", "mill")
    assert routing.understand(master(), SEED).server == Address("10.0.0.1", 6379)


@pytest.mark.parametrize("flags", ["s_down,master", "s_down,o_down,master", "slave"])
def test_a_master_that_seems_dead_is_none(flags: str) -> None:
    assert SentinelRouting("mill").understand(master(flags=flags), SEED).server is None


def slots(*ranges: tuple[int, int, bytes | None, int]) -> list[Any]:
    """A node's reply about slots, each range with a replica."""
    replica = [b"replica", 9, b"id", []]
    return [[first, last, [host, port, b"id", []], replica] for first, last, host, port in ranges]


def test_a_node_tells_the_owner_of_a_slot_and_the_other_masters() -> None:
    reply = slots((0, 99, b"one", 1), (100, 199, b"two", 2), (200, 299, b"one", 1))
    for slot, port in ((99, 1), (100, 2), (199, 2), (250, 1)):
        answer = ClusterRouting(slot).understand(reply, SEED)
        assert answer.server is not None and answer.server.port == port
        assert answer.seeds == (Address("one", 1), Address("two", 2))
    assert ClusterRouting(300).understand(reply, SEED).server is None


@pytest.mark.parametrize("host", [None, b""])
def test_a_node_that_does_not_know_its_name_is_where_it_was_reached(host: bytes | None) -> None:
    answer = ClusterRouting(5).understand(slots((0, 99, host, 7)), SEED)
    assert answer.server == Address("seed", 7)


def test_no_seed_has_the_first_word_twice_in_a_row() -> None:
    one, two, three = (Address(name, 1) for name in ("one", "two", "three"))
    seeds = Seeds((one, two))
    first = [next(seeds.in_turn()) for _ in range(4)]
    assert first[0] != first[1] and first[:2] == first[2:]
    seeds.learn((two, three))
    assert set(seeds.in_turn()) == {one, two, three}
    seeds.learn(())
    assert set(seeds.in_turn()) == {one, two}, "those that were given are never forgotten"


def test_why_nobody_could_tell_decides_whether_to_try_again() -> None:
    routing, away = ClusterRouting(5), exceptions.ConnectionError("refused")
    no = exceptions.ResponseError("ERR This instance has cluster support disabled")
    wrong = exceptions.AuthenticationError("invalid password")
    wrapped = exceptions.ConnectionError("wrapped")
    wrapped.__cause__ = wrong
    for failures, kind in (
        ([away, no], exceptions.ConnectionError),
        ([away, None], exceptions.ConnectionError),
        ([None, wrong], exceptions.ConnectionError),
        ([no, no], BrokerUnsupported),
        ([away, wrong], exceptions.AuthenticationError),
        ([wrapped], exceptions.AuthenticationError),
    ):
        told = not_found(routing, [(SEED, error) for error in failures])
        assert type(told) is kind, failures
    assert "slot 5: seed:1 says: refused; seed:1 says: there is none" in str(
        not_found(routing, [(SEED, away), (SEED, None)])
    )
