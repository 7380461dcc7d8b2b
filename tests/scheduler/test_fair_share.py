"""Deficit round robin against its bound and against a virtual token counter."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_scheduler.policy.fair_share import DeficitRoundRobin

QUANTUM = 100.0
MAX_JOB = 250

Shares = DeficitRoundRobin[str, int]

Key = TypeVar("Key", str, int)

weights = st.sampled_from([0.1, 0.5, 1.0, 1.0, 3.0])
jobs = st.integers(1, MAX_JOB)

#: (what is done, the server, another key that may be meant, tokens)
steps = st.tuples(
    st.sampled_from(["job"] * 6 + ["look", "skip", "toggle", "adjust"]),
    st.integers(0, 3),
    st.sampled_from(["c", "d", "e"]),
    jobs,
)


@dataclass
class Mill:
    """Two keys that stay and others that come, go, are skipped and corrected."""

    shares: Shares
    pair: frozenset[str]
    servers_of_pair: frozenset[int]
    service: Counter[str] = field(default_factory=Counter)

    def do(self, action: str, server: int, other: str, tokens: int) -> None:
        if action == "toggle":
            change = self.shares.deactivate if other in self.shares else self.shares.activate
            change(other)
        elif action == "adjust":
            self.shares.adjust(other, tokens - MAX_JOB / 2)
        else:
            self._serve(action, server, tokens)

    def _serve(self, action: str, server: int, tokens: int) -> None:
        key = self.shares.turn(server, self._open_to(server))
        if key is None or action == "look":
            return
        if action == "skip" and key not in self.pair:
            self.shares.skip(server)
        else:
            self.shares.charge(server, key, tokens)
            self.service[key] += tokens

    def _open_to(self, server: int) -> list[str] | None:
        return None if server in self.servers_of_pair else ["c", "d", "e"]


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(steps, max_size=250),
    weight_a=weights,
    weight_b=weights,
    num_servers=st.integers(1, 4),
)
def test_two_backlogged_keys_differ_by_a_quantum_and_a_job_for_each_of_their_servers(
    steps: list[tuple[str, int, str, int]], weight_a: float, weight_b: float, num_servers: int
) -> None:
    mill = Mill(Shares(QUANTUM), frozenset("ab"), frozenset(range(num_servers)))
    mill.shares.activate("a", weight_a)
    mill.shares.activate("b", weight_b)
    bound = num_servers * (QUANTUM + MAX_JOB / min(weight_a, weight_b))
    for step in steps:
        mill.do(*step)
        gap = mill.service["a"] / weight_a - mill.service["b"] / weight_b
        assert abs(gap) <= bound + 1e-6


def test_half_of_the_bound_can_be_reached() -> None:
    """So it is not so wide that anything passes."""
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    service = Counter[str]()
    visits = {server: shares.turn(server) for server in range(4)}
    # The servers at b have yet to give it the first token.
    for server, tokens in ((0, QUANTUM - 1), (2, QUANTUM - 1), (0, MAX_JOB), (2, MAX_JOB)):
        assert visits[server] == shares.turn(server) == "a"
        shares.charge(server, "a", tokens)
        service["a"] += int(tokens)
    assert {shares.turn(server) for server in range(4)} == {"b"}
    assert service["a"] - service["b"] >= 0.49 * 4 * (QUANTUM + MAX_JOB)


class VirtualTokenCounter:
    """The rule of VTC (Sheng et al. 2024, algorithm 2): serve whoever has the least counter.

    One that comes back is lifted to the least counter of those that are there.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._counters = dict.fromkeys(weights, 0.0)
        self._active: list[str] = []

    def activate(self, key: str) -> None:
        if self._active:
            least = min(self._counters[other] for other in self._active)
            self._counters[key] = max(self._counters[key], least)
        self._active.append(key)

    def deactivate(self, key: str) -> None:
        self._active.remove(key)

    def serve(self, tokens: int) -> str:
        key = min(self._active, key=lambda key: self._counters[key])
        self._counters[key] += tokens / self._weights[key]
        return key


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_servers=st.integers(1, 8))
def test_services_stay_within_the_bounds_of_a_virtual_token_counter(
    seed: int, num_servers: int
) -> None:
    rng = random.Random(seed)
    weights = {key: rng.choice([0.5, 1.0, 2.0]) for key in "abcde"}
    shares, oracle = Shares(QUANTUM), VirtualTokenCounter(weights)
    service, served = Counter[str](), Counter[str]()
    for name, weight in weights.items():
        shares.activate(name, weight)
        oracle.activate(name)
    for _ in range(400):
        tokens = rng.randint(1, MAX_JOB)
        key = _serve(shares, rng.randrange(num_servers), tokens)
        assert key is not None
        service[key] += tokens
        served[oracle.serve(tokens)] += tokens
    job = MAX_JOB / min(weights.values())
    bound = num_servers * (QUANTUM + job) + job
    for a in weights:
        for b in weights:
            gap = service[a] / weights[a] - service[b] / weights[b]
            gap_of_oracle = served[a] / weights[a] - served[b] / weights[b]
            assert abs(gap - gap_of_oracle) <= bound + 1e-6


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_servers=st.integers(1, 4))
def test_a_key_that_comes_back_has_no_claim_for_its_idle_time(seed: int, num_servers: int) -> None:
    rng = random.Random(seed)
    shares, oracle = Shares(QUANTUM), VirtualTokenCounter({"a": 1.0, "b": 1.0, "c": 1.0})
    service, served = Counter[str](), Counter[str]()

    def run(num_jobs: int) -> None:
        for _ in range(num_jobs):
            tokens = rng.randint(1, MAX_JOB)
            key = _serve(shares, rng.randrange(num_servers), tokens)
            assert key is not None
            service[key] += tokens
            served[oracle.serve(tokens)] += tokens

    for key in "abc":
        shares.activate(key)
        oracle.activate(key)
    run(rng.randrange(50))
    for mill in (shares, oracle):
        mill.deactivate("a")
    run(rng.randrange(300))
    for mill in (shares, oracle):
        mill.activate("a")
    before, before_of_oracle = service.copy(), served.copy()
    run(200)
    # b is in the middle of a turn when a comes: a quantum and the debts of both on top.
    bound = (num_servers + 1) * (QUANTUM + MAX_JOB)
    gap = (service - before)["a"] - (service - before)["b"]
    gap_of_oracle = (served - before_of_oracle)["a"] - (served - before_of_oracle)["b"]
    assert abs(gap) <= bound
    assert abs(gap - gap_of_oracle) <= bound + MAX_JOB


@given(num_cycles=st.integers(1, 60), tokens=st.integers(1, 99))
def test_coming_and_going_brings_no_more_than_staying(num_cycles: int, tokens: int) -> None:
    """A key that leaves after each small job, before its turn is over, gains nothing by it."""
    shares = Shares(QUANTUM)
    shares.activate("steady")
    service = Counter[str]()
    for _ in range(num_cycles):
        shares.activate("hopper")
        while (key := shares.turn(0)) != "hopper":
            assert key is not None
            shares.charge(0, key, 50)
            service[key] += 50
        shares.charge(0, "hopper", tokens)
        service["hopper"] += tokens
        shares.deactivate("hopper")
    assert service["hopper"] - service["steady"] <= QUANTUM + MAX_JOB


def test_a_visit_goes_on_until_its_quantum_is_used_up() -> None:
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    assert [_serve(shares, 0, 30) for _ in range(9)] == list("aaaabbbba")


def test_each_server_has_a_visit_of_its_own() -> None:
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    assert [_serve(shares, server, 60) for server in (0, 1, 0, 1, 0)] == list("ababa")


def test_what_a_visit_used_too_much_goes_off_the_next_turns() -> None:
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    assert _serve(shares, 0, 350) == "a"
    # It owes 250: two turns pass, and the third is worth 50.
    assert [_serve(shares, 0, 100) for _ in range(6)] == list("bbbaba")


def test_weights_share_in_proportion() -> None:
    shares = DeficitRoundRobin[int, int](QUANTUM)
    for name, weight in enumerate((8.0, 4.0, 1.0)):
        shares.activate(name, weight)
    service = Counter(_serve(shares, 0, 10) for _ in range(13_000))
    assert [service[key] for key in range(3)] == pytest.approx([8_000, 4_000, 1_000], rel=0.02)


def test_keys_that_are_not_among_those_asked_for_keep_their_turn() -> None:
    shares = Shares(QUANTUM)
    for key in "abc":
        shares.activate(key)
    for _ in range(5):
        assert shares.turn(0, among={"c"}) == "c"
        shares.charge(0, "c", 100)
    assert [_serve(shares, 1, 100) for _ in range(4)] == list("abca")


def test_a_few_of_many_keys_are_found_in_the_order_of_the_rotation() -> None:
    shares = DeficitRoundRobin[int, int](QUANTUM)
    for name in range(1_000):
        shares.activate(name)
    turns = []
    for _ in range(5):
        key = shares.turn(0, among=[700, 31, 500, 2_000])
        assert key is not None
        shares.charge(0, key, 100)
        turns.append(key)
    assert turns == [31, 500, 700, 31, 500]


def test_an_open_visit_ends_when_its_key_is_not_asked_for() -> None:
    shares = Shares(QUANTUM)
    for key in "ab":
        shares.activate(key)
    assert _serve(shares, 0, 40) == "a"
    assert shares.turn(0, among={"b"}) == "b"
    shares.charge(0, "b", 100)
    # What was left to a comes with its next turn.
    assert [_serve(shares, 0, 40) for _ in range(5)] == list("aaaab")


def test_a_skipped_key_keeps_its_place_for_other_servers() -> None:
    shares = Shares(QUANTUM)
    for key in "abc":
        shares.activate(key)
    assert shares.turn(0) == "a"
    shares.skip(0)
    assert shares.turn(0) == "b"
    shares.skip(0)
    assert [_serve(shares, 1, 100) for _ in range(4)] == list("abca")
    assert shares.turn(0) == "c"


def test_a_server_for_which_nobody_has_anything_is_told_so_and_may_ask_again() -> None:
    shares = Shares(QUANTUM)
    for name in "abc":
        shares.activate(name)
    for _ in range(2):
        asked = []
        while (key := shares.turn(0)) is not None:
            asked.append(key)
            shares.skip(0)
        assert asked == list("abc")


def test_looks_of_a_server_without_work_are_no_turns() -> None:
    """Else a key could be paid its debt by servers that find nothing."""
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    assert _serve(shares, 0, 1_000) == "a"
    shares.deactivate("a")
    for _ in range(50):
        assert shares.turn(1) == "b"
        shares.skip(1)
        assert shares.turn(1) is None
    shares.activate("a")
    assert [_serve(shares, 0, 100) for _ in range(8)] == list("bbbbbbbb")


def test_the_only_key_is_served_however_much_it_owes() -> None:
    shares = Shares(QUANTUM)
    shares.activate("a", 0.1)
    for _ in range(3):
        assert _serve(shares, 0, 1_000_000) == "a"


def test_a_correction_counts_as_service() -> None:
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    assert _serve(shares, 0, 100) == "a"
    shares.adjust("a", 200)
    assert _serve(shares, 0, 100) == "b"
    shares.adjust("b", -50)
    assert [_serve(shares, 0, 50) for _ in range(8)] == list("bbbbbaab")


def test_credit_is_spent_a_quantum_at_a_time() -> None:
    shares = Shares(QUANTUM)
    shares.activate("a")
    shares.activate("b")
    shares.adjust("a", -300)
    turns = "".join(str(_serve(shares, 0, 100)) for _ in range(12))
    assert turns == "aabaabaababa"


def test_an_idle_key_keeps_its_debt_and_loses_its_credit() -> None:
    shares = Shares(QUANTUM)
    for key in "abc":
        shares.activate(key)
    shares.adjust("a", 250)
    shares.adjust("b", -250)
    for key in "ab":
        shares.deactivate(key)
        shares.adjust(key, -20)
        shares.activate(key)
    # a owes 230 yet: two turns pass and of the third 70 are left.
    turns = [_serve(shares, 0, 100) for _ in range(8)]
    assert Counter(turns[:4]) == {"b": 2, "c": 2}
    assert "a" in turns[4:7]


def test_the_debt_of_an_idle_key_is_over_when_the_others_had_their_turns() -> None:
    shares = Shares(QUANTUM)
    for key in "ab":
        shares.activate(key)
    assert _serve(shares, 0, 300) == "a"
    shares.deactivate("a")
    for _ in range(5):
        assert _serve(shares, 0, 100) == "b"
    shares.activate("a")
    assert _serve(shares, 0, 100) == "a"


def test_a_key_that_had_no_turn_for_a_round_does_not_wait_for_one() -> None:
    shares = DeficitRoundRobin[int, int](QUANTUM)
    for key in range(100):
        shares.activate(key)
    for _ in range(210):
        _serve(shares, 0, 100)
    shares.activate(1_000)
    assert _serve(shares, 0, 100) == 1_000
    following = shares.turn(0)
    shares.deactivate(1_000)
    # Within the same round it waits like the others.
    shares.activate(1_000)
    assert [_serve(shares, 0, 100) for _ in range(100)].count(1_000) == 0
    assert _serve(shares, 0, 100) == following
    assert _serve(shares, 0, 100) == 1_000


def test_keys_that_come_ahead_take_no_more_than_half_of_the_turns() -> None:
    """A key that stays beside one that leaves for another has half of the other half."""
    shares = DeficitRoundRobin[int, int](QUANTUM)
    shares.activate(0)
    turns = []
    for newcomer in range(1, 500):
        shares.activate(newcomer)
        turns.append(_serve(shares, 0, 100))
        if turns[-1] == 0:
            turns.append(_serve(shares, 0, 100))
        shares.deactivate(newcomer)
    assert turns.count(0) >= len(turns) / 4 - 16


def test_a_server_that_is_gone_leaves_its_turn_to_others() -> None:
    shares = Shares(QUANTUM)
    for key in "ab":
        shares.activate(key)
    assert shares.turn(0) == "a"
    shares.remove_server(0)
    assert shares.turn(1) == "a"


def test_a_charge_without_a_visit_is_a_debt() -> None:
    shares = Shares(QUANTUM)
    for key in "ab":
        shares.activate(key)
    shares.charge(0, "a", 150)
    assert [_serve(shares, 0, 100) for _ in range(3)] == list("bab")


def test_idle_keys_are_forgotten_when_they_owe_nothing() -> None:
    shares = DeficitRoundRobin[int, int](QUANTUM)
    names = count()
    shares.activate(next(names))
    for key in (next(names) for _ in range(20_000)):
        shares.activate(key)
        while (turn := shares.turn(0)) != key:
            assert turn is not None
            shares.charge(0, turn, 100)
        shares.charge(0, key, 120)
        shares.deactivate(key)
    assert len(shares._idle) <= 1_025


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of 'a'"):
        Shares(QUANTUM).activate("a", weight)


def test_a_job_takes_as_many_steps_of_the_interpreter_with_ten_thousand_tenants() -> None:
    few, many = _steps_for_jobs(10), _steps_for_jobs(10_000)
    assert many <= 2 * few


def _steps_for_jobs(num_keys: int) -> int:
    shares = DeficitRoundRobin[int, int](8192.0)
    for key in range(num_keys):
        shares.activate(key, 1.0 + key % 3)

    def dispatch() -> None:
        for number in range(2_000):
            key = shares.turn(number % 50)
            assert key is not None
            shares.charge(number % 50, key, 20_000)
            if number % 10 == 0:
                shares.deactivate(key)
                shares.activate(key)

    return _count_lines(dispatch)


def _count_lines(function: Callable[[], None]) -> int:
    num_lines = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines


def _serve(shares: DeficitRoundRobin[Key, int], server: int, tokens: int) -> Key | None:
    key = shares.turn(server)
    if key is not None:
        shares.charge(server, key, tokens)
    return key


def test_a_key_without_a_turn_is_as_many_rounds_behind_as_the_others_had_turns() -> None:
    shares: DeficitRoundRobin[str, int] = DeficitRoundRobin(10)
    for key in "abc":
        shares.activate(key)
    assert shares.rounds_behind("a") == 0.0, "none had a turn"
    for _ in range(3):
        shares.charge(0, str(shares.turn(0)), 10)

    for number in range(6):
        key = shares.turn(0, ["b", "c"])
        assert key is not None
        shares.charge(0, key, 10)
        assert shares.rounds_behind("a") > number / 3

    assert shares.rounds_behind("b") < 1
    with pytest.raises(KeyError):
        shares.rounds_behind("nobody")
