"""Everything a worker writes while it works, by one thread."""

from tidemill_gpuworker.alarm import Alarm
from tidemill_gpuworker.publisher import Publisher
from tidemill_gpuworker.releaser import Releaser
from tidemill_gpuworker.status import StatusReporter

_IDLE_SECONDS = 1.0


class Outbound:
    """Flushes tokens, status and released jobs when their time has come.

    Tokens go first: nobody waits for a status longer than for a token.
    """

    def __init__(
        self, alarm: Alarm, publisher: Publisher, status: StatusReporter, releaser: Releaser
    ) -> None:
        self._alarm = alarm
        self._publisher = publisher
        self._status = status
        self._releaser = releaser

    @property
    def has_work(self) -> bool:
        """Whether anything is still to be written."""
        return self._publisher.has_work or self._status.has_work or self._releaser.has_work

    def turn(self) -> None:
        """Wait for work and do it; raises redis-py's errors, after which nothing is lost."""
        self._alarm.wait(_IDLE_SECONDS)
        try:
            self.flush()
        finally:
            self._alarm.set(self._publisher.next_due)

    def flush(self, *, everything: bool = False) -> None:
        """Write what is due, or everything."""
        self._publisher.flush(everything=everything)
        self._status.flush()
        self._releaser.flush()
