"""When batches whose work failed may go on, and which of them never will."""

from tidemill_scheduler.batches.lease import BatchName
from tidemill_scheduler.batches.setbacks import Setbacks

ONE, OTHER = BatchName("a", "batch_1"), BatchName("a", "batch_2")


def test_a_batch_rests_longer_each_time_but_never_longer_than_half_a_minute() -> None:
    setbacks, rests = Setbacks(3), []
    for _ in range(9):
        setbacks.delay(ONE, 0.0)
        rests.append(next(s / 2 for s in range(1, 100) if not setbacks.rests(ONE, s / 2)))
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert not setbacks.rests(OTHER, 0.0)


def test_a_batch_is_hopeless_after_so_many_faults_in_one_place() -> None:
    setbacks = Setbacks(3)
    for num in (1, 2, 3):
        assert not setbacks.is_hopeless(ONE)
        setbacks.note_fault(ONE, ("in_progress", 256), 0.0)
        assert setbacks.num_faults(ONE) == num
    assert setbacks.is_hopeless(ONE) and not setbacks.is_hopeless(OTHER)
    setbacks.forget(ONE)
    assert not setbacks.is_hopeless(ONE)


def test_a_batch_that_comes_further_is_not_hopeless() -> None:
    setbacks = Setbacks(2)
    for lines in range(10):
        setbacks.note_fault(ONE, ("in_progress", lines), 0.0)
        assert not setbacks.is_hopeless(ONE) and not setbacks.rests(ONE, 0.5)


def test_to_fail_earlier_than_before_is_no_progress() -> None:
    setbacks = Setbacks(3)
    for progress in (("in_progress", 10), ("in_progress", 0), ("in_progress", 10)):
        setbacks.note_fault(ONE, progress, 0.0)
    assert setbacks.is_hopeless(ONE)


def test_that_the_broker_is_away_is_no_fault_of_a_batch() -> None:
    setbacks = Setbacks(1)
    for _ in range(20):
        setbacks.delay(ONE, 0.0)
    assert not setbacks.is_hopeless(ONE)


def test_batches_that_are_gone_are_forgotten() -> None:
    setbacks = Setbacks(1)
    setbacks.note_fault(ONE, ("validating", 0), 0.0)
    setbacks.note_fault(OTHER, ("validating", 0), 0.0)
    setbacks.keep_only({OTHER})
    assert not setbacks.is_hopeless(ONE) and setbacks.is_hopeless(OTHER)
