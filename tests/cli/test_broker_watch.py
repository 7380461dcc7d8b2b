"""When a broker that died is started again, and when it is given up."""

import pytest

from tidemill.cli.broker_watch import MAX_REFUSALS, BrokerWatch
from tidemill.protocol.errors import (
    BrokerNotFound,
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    PortInUse,
)


class Broker:
    """Fails to start as often as it is told, and then runs."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.is_running = False

    def restart(self) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.is_running = True


class Stopping:
    """Ends a watch once the broker runs; tells the pauses before each try."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.pauses: list[float] = []

    def wait(self, timeout_seconds: float | None = None) -> bool:
        assert timeout_seconds is not None
        self.pauses.append(timeout_seconds)
        return self._broker.is_running


def watch(*failures: Exception) -> tuple[list[float], list[str]]:
    """Watch a broker that fails so; returns the pauses before the tries and why it gave up."""
    broker, reasons = Broker(*failures), list[str]()
    stopping = Stopping(broker)
    BrokerWatch(broker, stopping, reasons.append, clock=lambda: 0.0).run()
    return stopping.pauses[1::2], reasons


def test_a_broker_that_dies_while_it_is_started_is_tried_again_ever_later() -> None:
    killed = [BrokerUnavailable("killed")] * 6
    assert watch(*killed, OSError(28, "full")) == ([0.0, 0.5, 1.5, 3.5, 7.5, 10.0, 10.0, 10.0], [])


def test_a_broker_that_refuses_again_and_again_is_given_up_with_its_reason() -> None:
    refusals = [BrokerRefused("Bad file format")] * MAX_REFUSALS
    assert watch(*refusals)[1] == ["Bad file format"]
    assert watch(*refusals[1:], BrokerUnavailable("killed"), *refusals[1:])[1] == []
    assert watch(*[PortInUse("port 1")] * MAX_REFUSALS)[1] == ["port 1"]


@pytest.mark.parametrize("error", [BrokerNotFound("none"), ConfigError("wrong")])
def test_what_another_start_cannot_mend_is_given_up_at_once(error: Exception) -> None:
    assert watch(error) == ([0.0], [str(error)])
