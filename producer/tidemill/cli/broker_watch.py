"""Keeping an embedded broker alive: it is started again, ever later, until that is in vain."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from tidemill.cli.restarts import Backoff
from tidemill.protocol.errors import (
    BrokerNotFound,
    BrokerRefused,
    BrokerUnsupported,
    ConfigError,
    PortInUse,
    TidemillError,
)

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
#: So often in a row a server may refuse its data, settings or port, which takes about 13 s.
MAX_REFUSALS = 5


class RestartableBroker(Protocol):
    """A server that may die."""

    @property
    def is_running(self) -> bool:
        """Whether it serves."""

    def restart(self) -> None:
        """Start it again."""


class Signal(Protocol):
    """What tells that the watch is over."""

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return whether it is, at the latest when the time has passed."""


class BrokerWatch:
    """Starts a broker again whenever it has died.

    Calls ``give_up`` with the reason where another start would be in vain, and only there.
    """

    def __init__(
        self,
        broker: RestartableBroker,
        stopping: Signal,
        give_up: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._stopping = stopping
        self._give_up = give_up
        self._clock = clock
        self._backoff = Backoff()
        self._num_refusals = 0

    def run(self) -> None:
        """Watch until the stop signal, or until the broker is given up."""
        while not self._stopping.wait(_POLL_SECONDS):
            if self._broker.is_running:
                continue
            pause = self._backoff.delay_after_death(self._clock())
            if self._stopping.wait(pause) or not self._start_again():
                return

    def _start_again(self) -> bool:
        _log.warning("the broker died, starting it again on the same data")
        try:
            self._broker.restart()
        except (TidemillError, OSError) as error:
            return self._may_try_again(error)
        self._num_refusals = 0
        return True

    def _may_try_again(self, error: TidemillError | OSError) -> bool:
        told = error.one_line() if isinstance(error, TidemillError) else str(error)
        is_refusal = isinstance(error, BrokerRefused | PortInUse)
        self._num_refusals = self._num_refusals + 1 if is_refusal else 0
        if self._num_refusals >= MAX_REFUSALS or _is_in_vain(error):
            self._give_up(told)
            return False
        _log.warning("the broker could not be started, trying again: %s", told)
        return True


def _is_in_vain(error: Exception) -> bool:
    return isinstance(error, BrokerNotFound | BrokerUnsupported | ConfigError)
