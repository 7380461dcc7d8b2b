"""What a probe is told."""

from tidemill_scheduler.health import STALL_SECONDS, Health, Role


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def new_leader() -> tuple[Health, Clock]:
    clock = Clock()
    health = Health(clock)
    health.enter(Role.LEADER, 7)
    return health, clock


def test_a_leader_without_work_is_healthy() -> None:
    health, _ = new_leader()

    ok, details = health.check()

    assert ok
    assert (details["role"], details["epoch"]) == ("leader", 7)


def test_a_standby_is_healthy_and_a_process_without_broker_is_not() -> None:
    health = Health()
    assert not health.check()[0]

    health.enter(Role.STANDBY)
    assert health.check()[0]


def test_work_that_nobody_gets_makes_a_leader_unhealthy() -> None:
    health, clock = new_leader()
    health.note_work(runnable=True, num_dispatched=0)
    clock.now += STALL_SECONDS + 1
    health.beat()
    assert not health.check()[0]

    health.note_work(runnable=True, num_dispatched=1)
    assert health.check()[0]


def test_a_leader_whose_loop_hangs_is_unhealthy() -> None:
    health, clock = new_leader()
    clock.now += STALL_SECONDS + 1
    assert not health.check()[0]

    health.beat()
    assert health.check()[0]
