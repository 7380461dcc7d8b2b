"""Tells the scheduler how far the worker is; its credits follow from that."""

import threading
import time
from collections.abc import Callable

import redis

from tidemill.protocol.calls import LOG_TTL_MS
from tidemill.protocol.codec import encode
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import WorkerStatus
from tidemill_gpuworker.alarm import Alarm

#: The scheduler reads each entry once; older ones only help a new leader.
MAX_ENTRIES = 1000
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
        self._stream = keys.status(worker_id)
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

    def flush(self) -> None:
        """Write the latest status, if it was not; raises redis-py's errors."""
        status = self._latest
        if status is None:
            return
        with self._client.pipeline(transaction=True) as pipe:
            pipe.xadd(self._stream, {"s": encode(status)}, maxlen=MAX_ENTRIES, approximate=True)
            pipe.pexpire(self._stream, LOG_TTL_MS)
            pipe.execute()
        with self._lock:
            if self._latest is status:
                self._latest = None
