"""Tells the scheduler how far the worker is; its credits follow from that."""

import threading
import time
from collections import deque
from collections.abc import Callable

import redis
from pydantic import BaseModel

from tidemill.protocol import calls
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import run
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import WorkerStatus
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.cache_news import CacheNews

MIN_INTERVAL_SECONDS = 0.020
#: Batches of events that may wait: one that is being written, and one behind it.
_MAX_UNWRITTEN = 2


class StatusReporter:
    """Writes the latest status; of one that was overtaken before it was written, parts live on.

    Its finished sequences go over to the next one.  Batches of KV events are written one by one,
    in order, with whatever status is the latest then; a batch that the server may or may not have
    taken is written again as it was, so that a reader knows it by its number.
    """

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
        self._unwritten: WorkerStatus | None = None
        self._last = WorkerStatus()
        self._news: deque[CacheNews] = deque()
        self._reported_at = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether a working engine should report again."""
        return self._clock() - self._reported_at >= MIN_INTERVAL_SECONDS

    @property
    def has_work(self) -> bool:
        """Whether a status waits to be written."""
        return self._unwritten is not None or bool(self._news)

    @property
    def takes_news(self) -> bool:
        """Whether ``report`` may come with another batch of events."""
        return len(self._news) < _MAX_UNWRITTEN

    def report(self, status: WorkerStatus, news: CacheNews | None = None) -> None:
        """Have ``status`` and ``news`` written by the next ``flush``."""
        with self._lock:
            self._unwritten = _overtake(self._unwritten, status)
            if news is not None:
                self._news.append(news)
            self._reported_at = self._clock()
        self._alarm.ring()

    def flush(self) -> int:
        """Write what waits, one entry for each batch of events; returns the number of entries.

        Raises redis-py's errors, and then repeats it next time.
        """
        num_entries = 0
        while self.has_work:
            self._write()
            num_entries += 1
        return num_entries

    def _write(self) -> None:
        with self._lock:
            status = self._unwritten or self._last
            news = self._news[0] if self._news else None
            self._unwritten = None
        try:
            self._send(status, news)
        except BaseException:
            with self._lock:
                self._unwritten = _overtake(status, self._unwritten)
            raise
        with self._lock:
            self._last = status.model_copy(update={"finished": ()})
            if news is not None:
                self._news.popleft()

    def _send(self, status: WorkerStatus, news: CacheNews | None) -> None:
        call = calls.report(
            self._keys,
            worker_id=self._worker_id,
            status=status,
            events=_encode(news.events if news else None),
            snapshot=_encode(news.snapshot if news else None),
        )
        run(self._client, call)


def _encode(message: BaseModel | None) -> bytes:
    return b"" if message is None else encode(message)


def _overtake(older: WorkerStatus | None, newer: WorkerStatus | None) -> WorkerStatus | None:
    if older is None or newer is None:
        return newer or older
    if not older.finished:
        return newer
    return newer.model_copy(update={"finished": older.finished + newer.finished})
