"""Pub/sub for one reader, kept alive: it may lose messages, but never without saying so."""

import time
from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import redis
from redis.client import PubSub

from tidemill.protocol.errors import JobNotFinished

#: Without a message for so long, a reader looks at the truth again.
TICK_SECONDS = 1.5
#: After several looks in vain it looks less often: ten thousand readers whose jobs wait would
#: otherwise keep a core busy.
MAX_TICK_SECONDS = 12.0

_REOPEN_WAIT_SECONDS = 0.1

#: What a broken or refused subscription raises; none of it is fatal to the reader.
BROKEN = (redis.RedisError, OSError)


class Notice(NamedTuple):
    """A message of ``channel``; without ``data``, a hint that earlier ones may be missing.

    An empty ``channel`` stands for all channels.
    """

    channel: str
    data: bytes | None = None


#: Messages of all channels may be missing.
LOST = Notice("")


class Follower(Protocol):
    """Someone who reads the truth when told to and takes messages otherwise."""

    must_read: bool

    def take_message(self, data: bytes) -> None:
        """Take one message, which may be late, repeated or out of order."""


def pass_on(notice: Notice | None, follower: Follower) -> None:
    """Tell ``follower`` what came; None, nothing for a while, counts as a hint to read too."""
    if notice is None or notice.data is None:
        follower.must_read = True
    else:
        follower.take_message(notice.data)


def read_notice(message: dict[str, Any] | None) -> Notice | None:
    """Turn what redis-py makes of a message into a notice.

    A confirmation of a subscription, the first or one after a reconnect, counts as a hint: what
    was published before it was not received.
    """
    if message is None or message["type"] not in ("smessage", "ssubscribe"):
        return None
    data = message["data"] if message["type"] == "smessage" else None
    return Notice(message["channel"].decode(), data)


def wait_seconds(job_id: str, deadline: float | None, num_quiet: int = 0) -> float:
    """Return how long to wait for a notice; raises ``JobNotFinished`` if time is up.

    ``num_quiet`` is how often in a row nothing came.
    """
    tick = min(TICK_SECONDS * 2.0 ** min(num_quiet, 8), MAX_TICK_SECONDS)
    if deadline is None:
        return tick
    left = deadline - time.monotonic()
    if left <= 0:
        raise JobNotFinished(f"{job_id} is not finished, and time is up", job_id=job_id)
    return min(left, tick)


class Listener:
    """The channels of one reader on one connection; belongs to the thread that uses it."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._channels: set[str] = set()
        self._pubsub: PubSub | None = None
        #: Unsubscriptions that the server has not confirmed.
        self._leaving: Counter[str] = Counter()

    def add(self, channel: str) -> None:
        """Listen to ``channel`` too; its first notice is the confirmation."""
        if channel not in self._channels:
            self._channels.add(channel)
            self._tell("ssubscribe", channel)

    def discard(self, channel: str) -> None:
        """Listen to ``channel`` no longer."""
        if channel in self._channels:
            self._channels.discard(channel)
            if self._pubsub is not None:
                self._leaving[channel] += 1
            self._tell("sunsubscribe", channel)

    def get(self, timeout: float) -> Notice | None:
        """Return the next notice, or None if there is none for ``timeout`` seconds."""
        if not self._channels:
            time.sleep(timeout)
            return None
        deadline = time.monotonic() + timeout
        try:
            pubsub = self._pubsub or self._open()
            while True:
                left = max(0.0, deadline - time.monotonic())
                message = pubsub.get_message(timeout=left)
                self._check_farewell(message)
                notice = read_notice(message)
                if notice is not None or (message is None and not left):
                    return notice
        except BROKEN:
            self.close()
            # The reader now asks the server itself and so learns whether it is gone; the wait
            # bounds how often that happens if only subscribing fails.
            time.sleep(min(_REOPEN_WAIT_SECONDS, timeout))
            return LOST

    def close(self) -> None:
        """Give the connection back; the next ``get`` opens another one."""
        pubsub, self._pubsub = self._pubsub, None
        self._leaving.clear()
        if pubsub is not None:
            pubsub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> PubSub:
        pubsub: PubSub = self._client.pubsub()  # type: ignore[no-untyped-call]
        self._pubsub = pubsub
        pubsub.ssubscribe(*self._channels)
        return pubsub

    def _check_farewell(self, message: dict[str, Any] | None) -> None:
        if message is None or message["type"] != "sunsubscribe":
            return
        channel = message["channel"].decode()
        if not self._leaving[channel]:
            # The channel's slot has moved: the messages are now on another server.
            raise redis.ConnectionError(f"the server has dropped the channel {channel}")
        self._leaving[channel] -= 1

    def _tell(self, action: str, channel: str) -> None:
        if self._pubsub is None:
            return
        try:
            getattr(self._pubsub, action)(channel)
        except BROKEN:
            self.close()
