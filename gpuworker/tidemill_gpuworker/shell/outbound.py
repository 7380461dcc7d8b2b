"""Everything a worker writes while it works, by one thread."""

import logging
import time
from collections.abc import Callable

import redis

from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.alarm import NEVER, Alarm
from tidemill_gpuworker.shell.backoff import Backoff
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.shell.releaser import Releaser
from tidemill_gpuworker.shell.status import StatusReporter

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0


class Lane:
    """One kind of write; what the server refuses waits longer and longer for its next turn.

    ``flush`` writes what is due, or everything, and returns the number of writes; ``next_due``
    tells when there is something to write, by ``clock``, infinity for never.
    """

    def __init__(
        self,
        name: str,
        flush: Callable[[bool], int],
        next_due: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._flush = flush
        self._next_due = next_due
        self._clock = clock
        self._backoff = Backoff()
        self._retry_at = float("-inf")

    @property
    def wakes_at(self) -> float:
        """When the next turn of this lane is due."""
        return max(self._next_due(), self._retry_at)

    def flush(self, everything: bool) -> int:
        """Write unless the last refusal is too fresh; raises only if there is no server."""
        if self._clock() < self._retry_at and not everything:
            return 0
        try:
            num_writes = self._flush(everything)
        except (redis.ConnectionError, redis.TimeoutError):
            # Nobody there: that is no matter of this lane.
            raise
        except redis.RedisError as error:
            self._refused(error)
            return 0
        self._worked()
        return num_writes

    def _refused(self, error: redis.RedisError) -> None:
        metrics.REFUSED_WRITES.labels(self._name).inc()
        if not self._backoff.is_failing:
            _log.error("the server refuses the %s, trying on: %s", self._name, error)
        self._retry_at = self._clock() + self._backoff.failed()

    def _worked(self) -> None:
        if self._backoff.is_failing:
            _log.info("the server takes the %s again", self._name)
        self._backoff.worked()
        self._retry_at = float("-inf")


class Outbound:
    """Flushes tokens, status and released jobs when their time has come.

    Tokens go first: nobody waits for a status longer than for a token. The three are independent:
    while the server refuses one, the others go on at their own pace.
    """

    def __init__(
        self, alarm: Alarm, publisher: Publisher, status: StatusReporter, releaser: Releaser
    ) -> None:
        self._alarm = alarm
        self._lanes = (
            Lane(
                "tokens",
                lambda everything: publisher.flush(everything=everything),
                lambda: publisher.next_due,
            ),
            Lane("status", lambda _: status.flush(), lambda: _at_once_if(status.has_work)),
            Lane("releases", lambda _: releaser.flush(), lambda: _at_once_if(releaser.has_work)),
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is still to be written."""
        return any(lane.wakes_at < NEVER for lane in self._lanes)

    def turn(self) -> None:
        """Wait for work and do it; raises redis-py's errors, after which nothing is lost."""
        self._alarm.wait(_IDLE_SECONDS)
        try:
            self.flush()
        finally:
            self._alarm.set(min(lane.wakes_at for lane in self._lanes))

    def flush(self, *, everything: bool = False) -> int:
        """Write what is due, or everything; returns the number of writes that succeeded.

        Raises redis-py's errors when there is no server.
        """
        return sum(lane.flush(everything) for lane in self._lanes)


def _at_once_if(has_work: bool) -> float:
    return float("-inf") if has_work else NEVER
