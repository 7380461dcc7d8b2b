"""Entries that wait in lanes."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill_scheduler.intake.waiting_line import WaitingLine


def test_a_lane_is_due_at_its_time_and_keeps_its_order() -> None:
    line = WaitingLine()
    line.put("a", ["1", "2"], 5.0)
    line.append("a", "3")

    assert (len(line), line.next_at) == (3, 5.0)
    assert line.take_due(4.9, 10) == {}
    assert line.take_due(5.0, 2) == {"a": ["1", "2"]}


def test_entries_given_back_go_before_those_that_came_later() -> None:
    line = WaitingLine()
    line.put("a", ["1", "2"], 1.0)
    assert line.take_due(1.0, 10) == {"a": ["1", "2"]}
    line.append("a", "3")

    line.put("a", ["2"], 2.0)

    assert line.take_due(2.0, 10) == {"a": ["2", "3"]}


def test_a_line_knows_what_waits_in_it() -> None:
    line = WaitingLine()
    line.put("a", ["1", "2"], 1.0)
    line.append("a", "3")
    line.take_due(1.0, 1)

    assert [line.holds(entry_id) for entry_id in "123"] == [False, True, True]
    assert (line.num_in("a"), line.num_in("b")) == (2, 0)


def test_a_lane_without_entries_is_forgotten() -> None:
    line = WaitingLine()
    line.put("a", ["1"], 1.0)
    line.take_due(1.0, 10)
    assert "a" in line

    line.put("a", [], 1.0)

    assert "a" not in line
    assert (len(line), line.next_at) == (0, None)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=60))
def test_no_entry_is_lost_and_none_overtakes_another_of_its_lane(
    steps: list[tuple[str, int]],
) -> None:
    line, now = WaitingLine(), 0.0
    sent: dict[str, list[int]] = {lane: [] for lane in "abc"}
    got: dict[str, list[int]] = {lane: [] for lane in "abc"}
    for number, (lane, wait) in enumerate(steps):
        now += 1
        if lane in line:
            line.append(lane, str(number))
        else:
            line.put(lane, [str(number)], now + wait)
        sent[lane].append(number)
        for due, ids in line.take_due(now, 2).items():
            kept = ids[len(ids) // 2 :] if wait else []
            got[due] += [int(i) for i in ids if i not in kept]
            line.put(due, kept, now + wait)

    while len(line):
        now += 10
        for due, ids in line.take_due(now, 7).items():
            got[due] += map(int, ids)
            line.put(due, [], now)

    assert got == sent
