"""A thread that repeats one action for as long as its worker lives."""

import logging
import threading
from collections.abc import Callable

import redis

from tidemill_gpuworker.shell.backoff import LAST_SECONDS, Backoff

_log = logging.getLogger(__name__)


class Background:
    """Calls ``turn`` again and again until closed; a turn does its own waiting.

    While the broker is away turns are repeated with a delay that grows up to ``max_delay_seconds``,
    for ever: what a turn could not do must still be there for the next one. Any other exception
    ends the thread and is handed to ``on_death``. ``wake`` cuts the wait of a turn short when the
    thread is to end.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        on_death: Callable[[Exception], None],
        wake: Callable[[], None] = lambda: None,
        *,
        max_delay_seconds: float = LAST_SECONDS,
    ) -> None:
        self._turn = turn
        self._on_death = on_death
        self._wake = wake
        self._closing = threading.Event()
        self._backoff = Backoff(max_delay_seconds)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Sleep on the thread, but not beyond ``close``."""
        self._closing.wait(seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Let the current turn end and join the thread."""
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
                self._recovered()
            except (redis.RedisError, OSError) as error:
                self._outage(error)
            except Exception as error:
                # The outermost frame of a thread: without it the worker would live on half dead.
                _log.exception("the %s thread died", self._thread.name)
                self._on_death(error)
                return

    def _recovered(self) -> None:
        if self._backoff.is_failing:
            _log.info("%s: the broker is back", self._thread.name)
        self._backoff.worked()

    def _outage(self, error: Exception) -> None:
        if not self._backoff.is_failing:
            _log.warning("%s: the broker does not answer, trying on: %s", self._thread.name, error)
        self._closing.wait(self._backoff.failed())
