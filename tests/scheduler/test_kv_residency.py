"""What the daemon believes the workers' prefix caches to hold."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.waiting_jobs import key_of
from tidemill.protocol.messages import KvEvents
from tidemill_scheduler.policy.residency import MAX_HOLDERS, Residency
from tidemill_scheduler.policy.routing_hashes import shared_depth, split_key

PATHS = st.lists(st.integers(0, 2), max_size=5)


def make_residency(*worker_ids: str, capacity: int = 100) -> Residency:
    residency = Residency(64)
    for worker_id in worker_ids:
        residency.add_worker(worker_id, capacity)
    return residency


def stored(seq: int, *paths: tuple[int, ...]) -> KvEvents:
    return KvEvents(seq=seq, stored=b"".join(key_of(path) for path in paths))


def test_a_worker_holds_what_its_events_say() -> None:
    residency = make_residency("a", "b")
    assert residency.apply("a", stored(1, (1, 2, 3)))

    assert residency.depth("a", key_of((1, 2, 3, 4))) == 3
    assert residency.depth("a", key_of((1, 2, 9))) == 2
    assert residency.depth("b", key_of((1, 2, 3))) == 0

    gone = key_of((1, 2, 3))[8:]
    assert residency.apply("a", KvEvents(seq=2, evicted=gone))
    assert residency.depth("a", key_of((1, 2, 3))) == 1


def test_what_one_batch_both_stored_and_evicted_is_gone() -> None:
    residency = make_residency("a")
    key = key_of((1,))
    residency.apply("a", KvEvents(seq=1, stored=key, evicted=key))
    assert residency.depth("a", key) == 0
    assert residency.holders(key, 1) == []


def test_a_gap_in_the_events_changes_nothing_until_a_snapshot_comes() -> None:
    residency = make_residency("a")
    assert residency.apply("a", stored(1, (1,)))
    assert not residency.apply("a", stored(3, (2,)))
    assert residency.depth("a", key_of((1,))) == 1
    assert residency.depth("a", key_of((2,))) == 0

    residency.reset("a", 3, key_of((2, 5)))
    assert residency.apply("a", stored(2, (1,)))
    assert residency.apply("a", stored(3, (1,)))
    assert residency.depth("a", key_of((1,))) == 0
    assert residency.apply("a", stored(4, (3,)))
    assert residency.depth("a", key_of((3,))) == 1
    assert residency.depth("a", key_of((2, 5))) == 2


def test_a_job_on_its_way_casts_a_shadow_until_it_arrives() -> None:
    residency = make_residency("a")
    key = key_of((1, 2))
    residency.apply("a", KvEvents(seq=1))
    residency.dispatched("a", key)
    residency.dispatched("a", key)
    residency.arrived("a", key)
    assert residency.depth("a", key) == 2
    assert residency.warming(key, 1) == "a", "no cache holds any of it"

    residency.forget("a", key)
    assert residency.depth("a", key) == 0
    assert residency.holders(key, 1) == []


def test_a_prefix_warms_until_a_cache_holds_it() -> None:
    residency = make_residency("a", "b")
    residency.apply("a", KvEvents(seq=1))
    key = key_of((1, 2))
    assert residency.warming(key, 2) is None

    residency.dispatched("a", key)
    assert residency.warming(key, 2) == "a"
    residency.apply("a", stored(2, (1,)))
    assert residency.warming(key, 1) is None
    assert residency.warming(key, 2) == "a"
    residency.apply("b", stored(1, (1, 2)))
    assert residency.warming(key, 2) is None


def test_a_worker_without_events_is_believed_to_hold_what_arrived() -> None:
    residency = make_residency("a", capacity=3)
    for path in ((1, 2), (3, 4)):
        residency.dispatched("a", key_of(path))
        residency.arrived("a", key_of(path))

    assert residency.depth("a", key_of((3, 4))) == 2
    assert residency.depth("a", key_of((1, 2))) == 1
    assert residency.holders(key_of((1, 2)), 1) == [("a", 1)]


def test_a_job_refused_by_a_worker_without_events_leaves_nothing() -> None:
    residency = make_residency("a")
    residency.dispatched("a", key_of((1, 2)))
    residency.forget("a", key_of((1, 2)))
    assert residency.depth("a", key_of((1, 2))) == 0


def test_the_first_event_replaces_what_was_guessed() -> None:
    residency = make_residency("a")
    residency.dispatched("a", key_of((1, 2)))
    residency.arrived("a", key_of((1, 2)))
    residency.apply("a", stored(1, (7,)))

    assert residency.depth("a", key_of((1, 2))) == 0
    assert residency.holders(key_of((1, 2)), 1) == []
    residency.arrived("a", key_of((5,)))
    assert residency.depth("a", key_of((5,))) == 0


@given(st.lists(PATHS, max_size=30), st.integers(1, 12))
def test_a_guessed_cache_forgets_tails_first_and_the_last_job_stays(
    paths: list[list[int]], capacity: int
) -> None:
    residency = make_residency("a", capacity=capacity)
    for path in paths:
        residency.dispatched("a", key_of(path))
        residency.arrived("a", key_of(path))
        assert residency.depth("a", key_of(path)) == min(len(path), capacity)


def test_holders_are_named_deepest_first_and_no_more_than_eight() -> None:
    names = [f"w{number}" for number in range(20)]
    residency = make_residency(*names)
    for number, name in enumerate(names):
        residency.apply(name, stored(1, (1, 2, 3)[: 1 + number % 3]))

    found = residency.holders(key_of((1, 2, 3, 4)), 1)
    assert [depth for _, depth in found] == [3] * 6 + [2] * 2
    assert len(residency.holders(key_of((1,)), 1)) == MAX_HOLDERS
    assert residency.holders(key_of((1, 2, 3)), 4) == []


def test_prompts_with_a_common_beginning_see_different_ones_of_its_holders() -> None:
    names = [f"w{number}" for number in range(64)]
    residency = make_residency(*names)
    for name in names:
        residency.apply(name, stored(1, (1,)))
    seen = {found[0][0] for n in range(100) if (found := residency.holders(key_of((1, n)), 1))}
    assert len(seen) > 20


def test_a_worker_that_comes_back_holds_nothing_of_before() -> None:
    residency = make_residency("a", "b")
    residency.apply("a", stored(1, (1, 2)))
    residency.dispatched("a", key_of((3,)))
    residency.remove_worker("a")
    assert residency.holders(key_of((1, 2)), 1) == []
    assert residency.warming(key_of((3,)), 1) is None
    residency.arrived("a", key_of((3,)))
    residency.add_worker("c", 100)
    assert residency.depth("c", key_of((1, 2))) == 0
    with pytest.raises(KeyError):
        residency.depth("a", key_of((1,)))


@given(PATHS, PATHS)
def test_shared_depth_is_the_length_of_the_common_path(one: list[int], other: list[int]) -> None:
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert shared_depth(key_of(one), key_of(other)) == expected


@given(PATHS, PATHS, st.integers(0, 9))
def test_a_guessed_depth_never_changes_the_answer(
    held: list[int], path: list[int], near: int
) -> None:
    residency = make_residency("a")
    residency.reset("a", 1, key_of(held))
    key = key_of(path)
    assert residency.depth("a", key, near) == residency.depth("a", key)


class AgainstNaiveSets(RuleBasedStateMachine):
    """Caches as dictionaries of sets, kept prefix-closed as real ones are."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(64)
        self.resident: dict[str, set[bytes]] = {}
        self.shadow: dict[str, Counter[bytes]] = {}
        self.sent: list[tuple[str, bytes]] = []
        self.seq: dict[str, int] = {}

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        if name in self.resident:
            return
        self.residency.add_worker(name, 100)
        # An empty snapshot, so that the worker is one that tells.
        self.residency.reset(name, 0, b"")
        self.resident[name], self.shadow[name], self.seq[name] = set(), Counter(), 0

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = self._worker(data)
        self.residency.remove_worker(name)
        del self.resident[name], self.shadow[name], self.seq[name]
        self.sent = [(worker, key) for worker, key in self.sent if worker != name]

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), stored=st.lists(PATHS, max_size=4), evicted=st.lists(PATHS, max_size=3))
    def batch(self, data: st.DataObject, stored: list[list[int]], evicted: list[list[int]]) -> None:
        name = self._worker(data)
        held = self.resident[name]
        kept = b"".join(key_of(path) for path in stored)
        held.update(split_key(kept))
        # With a prefix leaves all that hangs on it.
        gone = [digest for path in evicted for digest in self._below(path)]
        held.difference_update(gone)
        self.seq[name] += 1
        events = KvEvents(seq=self.seq[name], stored=kept, evicted=b"".join(gone))
        assert self.residency.apply(name, events)
        assert self.residency.apply(name, events)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), ahead=st.integers(2, 4), path=PATHS)
    def skip(self, data: st.DataObject, ahead: int, path: list[int]) -> None:
        name = self._worker(data)
        events = KvEvents(seq=self.seq[name] + ahead, stored=key_of(path))
        assert not self.residency.apply(name, events)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), paths=st.lists(PATHS, max_size=4), ahead=st.integers(0, 5))
    def snapshot(self, data: st.DataObject, paths: list[list[int]], ahead: int) -> None:
        name = self._worker(data)
        digests = b"".join(key_of(path) for path in paths)
        self.seq[name] += ahead
        self.resident[name] = set(split_key(digests))
        self.residency.reset(name, self.seq[name], digests)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), path=PATHS)
    def dispatch(self, data: st.DataObject, path: list[int]) -> None:
        name, key = self._worker(data), key_of(path)
        self.residency.dispatched(name, key)
        self.shadow[name].update(split_key(key))
        self.sent.append((name, key))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), is_refused=st.booleans())
    def settle(self, data: st.DataObject, is_refused: bool) -> None:
        name, key = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.shadow[name].subtract(split_key(key))
        (self.residency.forget if is_refused else self.residency.arrived)(name, key)

    @precondition(lambda self: self.resident)
    @rule(path=PATHS, least=st.integers(1, 3))
    def look(self, path: list[int], least: int) -> None:
        key = key_of(path)
        depths = {name: self._depth(name, key) for name in self.resident}
        for name, depth in depths.items():
            assert self.residency.depth(name, key) == depth
        found = self.residency.holders(key, least)
        assert dict(found) == {n: d for n, d in depths.items() if d >= least}
        assert [d for _, d in found] == sorted((d for _, d in found), reverse=True)
        self._check_warming(key)

    @invariant()
    def nothing_is_left_of_what_is_gone(self) -> None:
        held = set().union(*self.resident.values()) if self.resident else set()
        shadows = {d for counts in self.shadow.values() for d, n in counts.items() if n}
        assert set(self.residency._resident.bits) == held
        in_flight = self.residency._in_flight._jobs
        assert {digest for key, _ in in_flight for digest in split_key(key)} == shadows

    def _check_warming(self, key: bytes) -> None:
        for depth, digest in enumerate(split_key(key), 1):
            bringers = {name for name, counts in self.shadow.items() if counts[digest]}
            is_warm = any(digest in held for held in self.resident.values())
            leader = self.residency.warming(key, depth)
            assert leader in bringers if bringers and not is_warm else leader is None

    def _worker(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.resident)))

    def _depth(self, name: str, key: bytes) -> int:
        brought = {digest for digest, count in self.shadow[name].items() if count}
        return _leading(key, self.resident[name] | brought)

    def _below(self, path: list[int]) -> list[bytes]:
        """Every hash of the imagined tree from the end of a path on."""
        if not path:
            return []
        found, level = [], [tuple(path)]
        while level:
            found += [key_of(node)[-8:] for node in level]
            level = [(*node, n) for node in level for n in range(3) if len(node) < 5]
        return found


def _leading(key: bytes, held: set[bytes]) -> int:
    depth = 0
    for digest in split_key(key):
        if digest not in held:
            break
        depth += 1
    return depth


TestAgainstNaiveSets = AgainstNaiveSets.TestCase
TestAgainstNaiveSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
