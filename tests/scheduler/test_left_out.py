"""Entries for which there is no room in memory."""

import pytest

from tidemill_scheduler.intake import left_out
from tidemill_scheduler.intake.left_out import LeftOut
from tidemill_scheduler.intake.waiting_line import WaitingLine


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "MAX_PER_LANE", 4)
    monkeypatch.setattr(left_out, "MAX_WAITING", 6)


@pytest.fixture
def waiting() -> WaitingLine:
    """Four entries of "a" and one of "b", both lanes due at 1 s."""
    line = WaitingLine()
    line.put("a", ["1-0", "2-0", "3-0", "4-0"], 1.0)
    line.put("b", ["5-0"], 2.0)
    return line


def test_a_full_lane_is_read_again_once_half_of_it_is_gone(waiting: WaitingLine) -> None:
    beyond = LeftOut(waiting)
    assert beyond.add("a", "7-3")
    assert not beyond.add("b", "7-4")
    assert beyond.rewind() is None

    waiting.take_due(1.0, 1)
    assert beyond.add("a", "8-0"), "no entry overtakes those left out before it"
    assert beyond.rewind() is None
    waiting.put("a", [], 1.0)
    waiting.take_due(1.0, 1)

    assert beyond.rewind() == "7-2"
    assert beyond.rewind() is None
    assert not beyond.add("a", "7-3")


def test_a_lane_of_a_full_line_is_read_again_once_it_is_empty(waiting: WaitingLine) -> None:
    beyond = LeftOut(waiting)
    waiting.append("b", "6-0")
    assert beyond.add("b", "9-0")
    assert beyond.rewind() is None

    waiting.take_due(1.0, 4)
    waiting.put("a", ["1-0", "2-0", "3-0", "4-0"], 9.0)
    assert beyond.rewind() is None
    waiting.take_due(2.0, 2)

    assert beyond.rewind() == f"8-{2**64 - 1}"
