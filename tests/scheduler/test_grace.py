"""When leases that ran out may be believed."""

import pytest

from tidemill_scheduler.grace import Grace

LEASE_SECONDS = 9.0


def new_grace(seen_seconds: float) -> Grace:
    """The grace after so long with the server "s", which was last seen at 100 s."""
    grace = Grace(LEASE_SECONDS)
    grace.resume("s", 100.0 - seen_seconds)
    grace.lacks(100.0)
    return grace


def test_a_new_process_waits_a_whole_lease() -> None:
    grace = new_grace(0.0)

    assert grace.lacks(100.0) == LEASE_SECONDS
    assert grace.lacks(104.0) == LEASE_SECONDS - 4
    assert grace.lacks(109.0) == 0
    assert grace.lacks(500.0) == 0


def test_another_server_process_begins_the_grace_anew() -> None:
    grace = new_grace(1000.0)

    grace.resume("another", 100.1)

    assert grace.lacks(100.1) == LEASE_SECONDS


def test_connections_shorter_than_a_lease_add_up() -> None:
    grace = new_grace(3.0)
    grace.resume("s", 100.1)
    grace.lacks(103.1)
    grace.resume("s", 103.2)

    assert grace.lacks(103.2) == pytest.approx(LEASE_SECONDS - 6.0 + 2 * 0.3)


@pytest.mark.parametrize(("absence", "lack"), [(0.1, 0.3), (2.0, 6.0), (3.0, 9.0), (50.0, 9.0)])
def test_an_absence_takes_three_times_its_length_away(absence: float, lack: float) -> None:
    grace = new_grace(1000.0)

    grace.resume("s", 100.0 + absence)

    assert grace.lacks(100.0 + absence) == pytest.approx(lack)
