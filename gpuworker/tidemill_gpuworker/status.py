"""Tells the scheduler how far the worker is; its credits follow from that."""

import threading
import time
from collections.abc import Callable

import redis

from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import WorkerStatus
from tidemill_gpuworker.alarm import Alarm

MIN_INTERVAL_SECONDS = 0.020


class StatusReporter:
    """Writes the latest status; one that was overtaken before it was written is dropped."""

    def __init__(
        self,
        client: redis.Redis,
        keys: ShardKeys,
        worker_id: str,
        alarm: Alarm,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._alarm = alarm
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: WorkerStatus | None = None
        self._reported_at = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether a working engine should report again."""
        return self._clock() - self._reported_at >= MIN_INTERVAL_SECONDS

    @property
    def has_work(self) -> bool:
        """Whether a status waits to be written."""
        return self._latest is not None

    def report(self, status: WorkerStatus) -> None:
        """Have ``status`` written by the next ``flush``."""
        with self._lock:
            self._latest = status
            self._reported_at = self._clock()
        self._alarm.ring()

    def flush(self) -> int:
        """Write the latest status, if it was not; returns whether it did.

        Raises redis-py's errors, and then repeats it next time.
        """
        status = self._latest
        if status is None:
            return 0
        run(self._client, calls.report(self._keys, worker_id=self._worker_id, status=status))
        with self._lock:
            if self._latest is status:
                self._latest = None
        return 1
