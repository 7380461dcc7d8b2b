"""When leases that ran out may be believed."""

import pytest

from tidemill_scheduler.fleet.grace import Grace, Moment

LEASE_SECONDS = 9.0
#: The server's clock counts from another time than ours.
OFFSET = 1e9


def at(seconds: float, slept: float = 0.0) -> Moment:
    """A moment by our clock, which stood still for ``slept`` seconds."""
    return Moment(seconds, OFFSET + seconds + slept)


def pass_time(grace: Grace, start: float, end: float) -> float:
    """Let a process look each second; returns what the grace lacks at last."""
    lack = grace.lacks(at(start))
    for second in range(1, round(end - start) + 1):
        lack = grace.lacks(at(start + second))
    return lack


def new_grace(seen_seconds: float) -> Grace:
    """The grace after so long with the server "s", which was last seen at 100 s."""
    grace = Grace(LEASE_SECONDS)
    grace.resume("s", at(100.0 - seen_seconds))
    pass_time(grace, 100.0 - seen_seconds, 100.0)
    return grace


def test_a_new_process_waits_a_whole_lease() -> None:
    grace = new_grace(0.0)

    assert grace.lacks(at(100.0)) == LEASE_SECONDS
    assert pass_time(grace, 100.0, 104.0) == LEASE_SECONDS - 4
    assert not grace.is_over(at(104.0))
    assert pass_time(grace, 104.0, 109.0) == 0
    assert grace.is_over(at(109.0))
    assert pass_time(grace, 109.0, 150.0) == 0


def test_another_server_process_begins_the_grace_anew() -> None:
    grace = new_grace(100.0)

    grace.resume("another", at(100.1))

    assert not grace.is_over(at(100.1))
    assert grace.lacks(at(100.1)) == LEASE_SECONDS


def test_connections_shorter_than_a_lease_add_up() -> None:
    grace = new_grace(3.0)
    grace.resume("s", at(100.1))
    pass_time(grace, 100.1, 103.1)
    grace.resume("s", at(103.2))

    assert grace.lacks(at(103.2)) == pytest.approx(LEASE_SECONDS - 6.0 + 2 * 0.3)


@pytest.mark.parametrize(("absence", "lack"), [(0.1, 0.3), (2.0, 6.0), (3.0, 9.0), (50.0, 9.0)])
def test_an_absence_takes_three_times_its_length_away(absence: float, lack: float) -> None:
    grace = new_grace(100.0)

    grace.resume("s", at(100.0 + absence))

    assert not grace.is_over(at(100.0 + absence))
    assert grace.lacks(at(100.0 + absence)) == pytest.approx(lack, abs=1e-6)


@pytest.mark.parametrize(("gap", "lack"), [(2.0, 0.0), (2.5, 7.5), (50.0, 9.0)])
def test_a_long_gap_on_a_connection_is_an_absence(gap: float, lack: float) -> None:
    grace = new_grace(100.0)
    assert grace.is_over(at(100.0 + gap)) == (not lack)

    assert grace.lacks(at(100.0 + gap)) == pytest.approx(lack, abs=1e-6)

    assert grace.is_over(at(100.0 + gap)) == (not lack)


def test_a_sleep_that_only_the_servers_clock_shows_is_an_absence() -> None:
    grace = new_grace(100.0)
    assert not grace.is_over(at(100.1, slept=60.0))

    assert grace.lacks(at(100.1, slept=60.0)) == LEASE_SECONDS
