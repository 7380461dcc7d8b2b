"""The pace of full workers, against plays of workers whose throughput is known."""

import heapq

import pytest

from tidemill_scheduler.fleet.rates import Pace

SLOTS = 64


class Played:
    """Workers of 64 slots with jobs of one length, looked at each second."""

    def __init__(self, job_seconds: float, pace: Pace | None = None, stagger: float = 0.0) -> None:
        self.pace = pace or Pace()
        self.waiting = 0
        self.job_seconds = job_seconds
        self._stagger = stagger
        self._ends: list[float] = []
        self._now = 0.0

    def play(self, seconds: int, arrivals_per_second: int = 0) -> None:
        """Let so many seconds pass."""
        for _ in range(seconds):
            self.waiting += arrivals_per_second
            self._now += 1.0
            self.pace.note(self._end(), len(self._ends), 1.0, is_waiting=self.waiting > 0)

    def _end(self) -> int:
        num_ended = 0
        while self._ends and self._ends[0] <= self._now:
            heapq.heappop(self._ends)
            num_ended += 1
        while self.waiting and len(self._ends) < SLOTS:
            self.waiting -= 1
            delay = self._stagger * len(self._ends) / SLOTS
            heapq.heappush(self._ends, self._now + self.job_seconds + delay)
        return num_ended


@pytest.mark.parametrize("stagger", [0.0, 30.0])
def test_the_pace_of_a_burst_is_near_the_truth_from_before_its_first_end(stagger: float) -> None:
    played = Played(60.0, stagger=stagger)
    played.waiting = 600
    truth = SLOTS / 60.0
    played.play(30)
    while played.waiting:
        assert truth / 3 <= played.pace.per_second <= truth * 3
        played.play(1)


def test_ends_after_the_line_is_empty_count() -> None:
    played = Played(60.0)
    played.waiting = SLOTS + 1
    played.play(1)
    played.waiting = 0
    played.play(70)
    assert played.pace.per_second == pytest.approx(SLOTS / 60.0, rel=0.2)


def test_few_jobs_at_a_time_do_not_look_like_slow_workers() -> None:
    played = Played(10.0)
    played.waiting = 1_900
    played.play(300)
    assert played.waiting == 0
    before = played.pace.per_second
    assert before == pytest.approx(SLOTS / 10.0, rel=0.2)
    played.play(2_000, arrivals_per_second=1)
    assert played.pace.per_second == pytest.approx(before, rel=0.2)


def test_a_new_leader_goes_on_from_the_known_pace_whatever_runs_already() -> None:
    old = Played(60.0)
    old.waiting = 600
    old.play(100)
    old.pace = Pace(SLOTS / 60.0)
    for _ in range(100):
        old.play(1)
        assert SLOTS / 60.0 / 2 <= old.pace.per_second <= SLOTS / 60.0 * 2


def test_jobs_that_vanish_from_their_workers_are_no_progress() -> None:
    pace = Pace()
    pace.note(0, SLOTS, 1.0, is_waiting=True)
    pace.note(0, SLOTS // 2, 1.0, is_waiting=True)
    pace.note(0, 0, 1.0, is_waiting=True)
    assert pace.per_second <= SLOTS / 2


def test_nothing_is_known_before_jobs_had_to_wait() -> None:
    pace = Pace()
    for _ in range(10):
        pace.note(1, 1, 1.0, is_waiting=False)
    assert pace.per_second == 0.0
