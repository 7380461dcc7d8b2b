"""Which batches get the places of a runner while several tenants want them."""

import random
from collections import Counter
from collections.abc import Iterable

from tidemill_scheduler.batches.lease import BatchName
from tidemill_scheduler.batches.places import Moves, Places

TURN = 30.0


def names(text: str) -> list[BatchName]:
    """Batches such as ``a1``, the first of the tenant ``a``."""
    return [BatchName(word[0], word) for word in text.split()]


def told(found: Iterable[BatchName]) -> str:
    return " ".join(name.batch_id for name in found)


def places_of(held: str, num_places: int = 4, now: float = 0.0) -> Places:
    places = Places(num_places, TURN)
    for name in names(held):
        places.take(name, now)
    return places


def carry_out(places: Places, moves: Moves, now: float) -> None:
    for name in moves.give_back:
        places.give_back(name)
    for name in moves.begin:
        places.take(name, now)


def test_a_tenant_that_is_alone_has_all_places_and_keeps_them() -> None:
    places = places_of("")
    waiting = names("a1 a2 a3 a4 a5 a6")
    carry_out(places, moves := places.moves(waiting, 0.0), 0.0)
    assert (told(moves.begin), moves.give_back) == ("a1 a2 a3 a4", ())
    assert places.moves(waiting[4:], 1e9) == Moves()


def test_free_places_go_to_the_tenants_in_turn_and_to_their_batches_in_order() -> None:
    moves = places_of("").moves(names("a1 a2 a3 b1 b2 c1"), 0.0)
    assert told(moves.begin) == "a1 b1 c1 a2"


def test_a_place_that_falls_free_goes_to_the_tenant_with_the_fewest() -> None:
    places = places_of("a1 a2 b1")
    assert told(places.moves(names("a3 b2"), 0.0).begin) == "b2"


def test_a_tenant_without_a_place_gets_one_at_once_of_a_tenant_with_several() -> None:
    moves = places_of("a1 a2 a3 a4").moves(names("a5 b1"), 0.0)
    assert (told(moves.begin), told(moves.give_back)) == ("b1", "a4")


def test_places_are_levelled_and_then_stay_where_they_are() -> None:
    places = places_of("a1 a2 a3 a4")
    carry_out(places, moves := places.moves(names("b1 b2 b3"), 0.0), 0.0)
    assert (told(moves.begin), set(moves.give_back)) == ("b1 b2", set(names("a3 a4")))
    assert places.moves(names("b3"), 1e9) == Moves()


def test_the_only_batch_of_a_tenant_keeps_its_place_for_its_turn() -> None:
    places = Places(2, TURN)
    places.take(BatchName("a", "a1"), 0.0)
    places.take(BatchName("b", "b1"), 10.0)
    assert places.moves(names("c1"), TURN - 1) == Moves()
    moves = places.moves(names("c1 d1"), TURN)
    assert (told(moves.begin), told(moves.give_back)) == ("c1", "a1")


def test_many_tenants_with_endless_batches_get_places_in_turn() -> None:
    tenants, num_places = "abcdefg", 3
    waiting, places = [BatchName(t, f"{t}1") for t in tenants], Places(num_places, TURN)
    rounds: list[str] = []
    for number in range(7):
        now = number * TURN
        moves = places.moves(waiting, now)
        carry_out(places, moves, now)
        for name in moves.give_back:
            places.leave(name)
        # They wait in the order of their ends, in which none may overtake the others.
        waiting = sorted(
            {*waiting, *moves.give_back} - set(moves.begin), key=lambda name: name.tenant
        )
        rounds.append(told(sorted(moves.begin, key=lambda name: name.tenant)))
    assert rounds == [
        *("a1 b1 c1", "d1 e1 f1", "a1 b1 g1", "c1 d1 e1"),
        *("a1 f1 g1", "b1 c1 d1", "e1 f1 g1"),
    ]


def test_what_is_finished_beside_the_others_counts_for_its_tenant() -> None:
    places = places_of("a1 b1 c1 d1")
    [gone] = names("a1")
    places.give_back(gone)
    places.take(BatchName("e", "e1"), 0.0)
    assert places.moves(names("a2"), TURN) == Moves()
    places.leave(gone)
    assert told(places.moves(names("a2"), TURN).give_back) == "b1"


def test_a_tenant_does_not_get_around_the_bound_by_giving_places_back() -> None:
    places, now = places_of("a1 a2 a3 a4"), 0.0
    for number in range(5, 10):
        now += 1.0
        carry_out(places, places.moves(names(f"a{number} b{number}"), now), now)
        for name in names(f"b{number}"):
            places.leave(name)
    assert places.num_busy == 4
    assert told(places.moves(names("a0 b0"), now).begin) == "b0"


def test_no_more_give_their_places_back_than_can_be_finished() -> None:
    places = Places(1, TURN)
    for number, tenant in enumerate("abcdef"):
        now = number * TURN
        carry_out(places, places.moves(names(f"{tenant}1"), now), now)
    assert places.num_busy == 3


def test_nothing_makes_room_for_a_batch_that_another_runner_works_on() -> None:
    places = places_of("a1 a2")
    [other] = names("b1")
    places.doubt(other, 5.0)
    assert told(places.moves([other, *names("a3")], 1.0).begin) == "a3 b1"
    places.take(BatchName("a", "a3"), 1.0)
    places.take(BatchName("a", "a4"), 1.0)
    assert places.moves([other], 1.0) == Moves()
    # By then its runner has renewed its lease, or died.
    assert told(places.moves([other], 5.0).begin) == "b1"


def test_turns_are_forgotten_with_the_last_batch_of_a_tenant() -> None:
    places = Places(1, TURN)
    for number, name in enumerate(names("a1 b1")):
        places.take(name, float(number))
        places.leave(name)
    assert told(places.moves(names("b2 a2"), 2.0).begin) == "a2"
    places.keep_only(names("a2"))
    assert told(places.moves(names("b2 a2"), 2.0).begin) == "b2"


def test_whatever_comes_and_goes_nobody_has_two_more_than_a_tenant_who_waits() -> None:
    chance = random.Random(7)
    for num_places in (1, 2, 4):
        places, waiting = Places(num_places, TURN), list[BatchName]()
        held: set[BatchName] = set()
        leaving: set[BatchName] = set()
        for step in range(400):
            tenant = chance.choice("aaaabbc")
            waiting.append(BatchName(tenant, f"{tenant}{step}"))
            for name in [n for n in sorted(held | leaving, key=str) if chance.random() < 0.2]:
                places.leave(name)
                if name in leaving:
                    waiting.append(name)
                held.discard(name)
                leaving.discard(name)
            moves = places.moves(waiting, float(step))
            carry_out(places, moves, float(step))
            held = (held | set(moves.begin)) - set(moves.give_back)
            leaving |= set(moves.give_back)
            waiting = [name for name in waiting if name not in moves.begin]
            assert len(held) <= num_places and len(leaving) <= 2 * num_places
            assert len(held) + len(leaving) == places.num_busy
            has, busy = (Counter(n.tenant for n in some) for some in (held, [*held, *leaving]))
            assert max(busy.values()) <= num_places
            if len(leaving) < 2 * num_places:
                assert all(max(has.values()) < busy[name.tenant] + 2 for name in waiting)
