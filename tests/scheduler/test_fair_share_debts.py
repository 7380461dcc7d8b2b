"""What a key keeps and owes between its turns, and where it stands among the others."""

from collections import Counter

from tidemill_scheduler.policy.fair_share import DeficitRoundRobin

QUANTUM = 100.0


def test_a_key_that_passes_turns_to_pay_its_debt_is_not_behind() -> None:
    shares = DeficitRoundRobin[str, int](QUANTUM)
    for key in ("a", "b"):
        shares.activate(key)
        assert shares.turn(0, {key}) == key
        shares.charge(0, key, QUANTUM)
    shares.adjust("a", 20 * QUANTUM)
    for _ in range(15):
        assert shares.turn(0) == "b"
        shares.charge(0, "b", QUANTUM)
        assert shares.rounds_behind("a") <= 1


def test_what_visits_left_over_is_kept_up_to_one_portion() -> None:
    shares = DeficitRoundRobin[str, int](QUANTUM)
    shares.activate("a")
    shares.activate("b")
    for _ in range(20):
        # The first call only takes note that it was skipped.
        assert "a" in (shares.turn(0, {"a"}), shares.turn(0, {"a"}))
        shares.charge(0, "a", 1)
        shares.skip(0)
    served = Counter[str]()
    for _ in range(100):
        key = shares.turn(0)
        assert key is not None
        shares.charge(0, key, 10)
        served[key] += 10
        assert served["a"] - served["b"] <= 2 * QUANTUM
    assert served["b"] > 0


def test_a_debt_that_an_idle_key_gets_is_not_worked_off_by_the_time_before() -> None:
    shares = DeficitRoundRobin[str, int](QUANTUM)
    shares.activate("a")
    shares.deactivate("a")
    shares.activate("b")
    for _ in range(50):
        assert shares.turn(0) == "b"
        shares.charge(0, "b", QUANTUM)
    shares.adjust("a", 10 * QUANTUM)
    shares.activate("a")
    assert shares.debt("a") == 9 * QUANTUM


def test_a_key_is_where_it_was_if_all_its_visits_came_to_nothing_in_whatever_order() -> None:
    shares = DeficitRoundRobin[str, int](QUANTUM)
    shares.activate("a")
    shares.activate("b")
    assert [shares.turn(server, {"a"}) for server in (0, 1)] == ["a", "a"]
    shares.skip(0)
    shares.skip(1)
    assert shares.turn(2) == "a"
