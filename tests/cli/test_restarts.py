"""When processes that died are started again."""

from tidemill.cli.child import ChildSpec
from tidemill.cli.restarts import Backoff, Restarts


def test_a_process_that_dies_is_started_at_once_and_then_ever_later() -> None:
    backoff = Backoff()
    assert [backoff.delay_after_death(0.0) for _ in range(4)] == [0.0, 0.5, 1.5, 3.5]
    assert [backoff.delay_after_death(0.0) for _ in range(3)][-1] == 10.0
    assert backoff.delay_after_death(100.0) == 0.0


def test_a_process_that_keeps_crashing_delays_no_other() -> None:
    now = 0.0
    restarts = Restarts(clock=lambda: now)
    crashing, other = ChildSpec("worker-1", "m"), ChildSpec("scheduler", "m")
    for _ in range(4):
        restarts.died(crashing)
    restarts.died(other)
    assert restarts.next_in_seconds() == 0.0
    assert restarts.take_due() == [other]
    assert restarts.next_in_seconds() == 3.5
    now = 3.5
    assert restarts.take_due() == [crashing]
    assert restarts.next_in_seconds() is None
