"""One reader's messages of one channel, and whose turn it is to take them."""

import asyncio
import math
import weakref
from collections import deque

from tidemill._listener import LOST, Notice

#: A reader that lags behind by so many messages is better off with the log.
_MAX_PENDING = 512

#: Readers of each kind that are woken in one turn of the event loop.
PER_TURN = 2

#: Long waits end together at multiples of this, so that those whose readers then look at their logs
#: share a round trip.
_LONG_SECONDS = 1.0
_GRID_SECONDS = 0.05

#: Timers of an event loop may be early by so much.
_TIMER_SECONDS = 0.001


class Subscription:
    """One reader's messages of one channel; belongs to the task that reads."""

    def __init__(self, channel: str, turns: "Turns | None" = None) -> None:
        self.channel = channel
        #: Whether it has had a message that is more than a hint.
        self.has_begun = False
        self._turns = Turns() if turns is None else turns
        self._pending: deque[Notice] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._expiry = 0.0
        # One timer serves many waits: to make one for each would cost as much as a message does.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    async def get(self, timeout: float) -> Notice | None:
        """Return the next notice, or None if there is none for ``timeout`` seconds."""
        if not self._pending:
            await self._wait(timeout)
        return self.get_nowait()

    def get_nowait(self) -> Notice | None:
        """Return the next notice if it is here."""
        if not self._pending:
            return None
        notice = self._pending.popleft()
        self.has_begun = self.has_begun or notice.data is not None
        return notice

    def put(self, notice: Notice) -> None:
        """Hand over a notice; too many in a row are told as one loss."""
        if len(self._pending) >= _MAX_PENDING:
            self._pending.clear()
            notice = LOST
        self._pending.append(notice)
        if self._waiter is not None and len(self._pending) == 1:
            self._turns.add(self)

    def wake(self) -> None:
        """Let the reader take what is here."""
        # Without news it would take this for the end of its patience.
        if self._pending:
            self._end_wait()

    def end(self) -> None:
        """Let go of the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._expiry = _expiry(loop.time(), timeout)
        if self._timer is None or self._expiry < self._timer_due:
            self._set_timer(loop)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.end()
        self._timer_due = self._expiry
        # The loop must not keep a reader alive that nobody else does.
        self._timer = loop.call_at(self._expiry, _note_time, weakref.ref(self))

    def note_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the wait whose time is up, if there is one."""
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() + _TIMER_SECONDS >= self._expiry:
            self._end_wait()
        else:
            self._set_timer(loop)

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _expiry(now: float, timeout: float) -> float:
    end = now + timeout
    return end if timeout < _LONG_SECONDS else math.ceil(end / _GRID_SECONDS) * _GRID_SECONDS


def _note_time(reader: "weakref.ref[Subscription]") -> None:
    alive = reader()
    if alive is not None:
        alive.note_time(asyncio.get_running_loop())


class Turns:
    """Wakes readers that have news, a few in each turn of the event loop.

    When thousands of streams get a token at one moment, to wake them all would be one turn, and
    whatever else begins would wait for its end.  Between turns others go on, and who comes late to
    its turn takes what has come meanwhile at once.  Those that have had no message yet do not
    stand behind those that are running.
    """

    def __init__(self) -> None:
        self._beginning: deque[Subscription] = deque()
        self._running: deque[Subscription] = deque()
        #: The event loop in which the next turn is due, if one is.
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, reader: Subscription) -> None:
        """Wake a reader when its turn comes; it must be waiting."""
        (self._running if reader.has_begun else self._beginning).append(reader)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        for readers in (self._beginning, self._running):
            for _ in range(min(PER_TURN, len(readers))):
                readers.popleft().wake()
        loop = asyncio.get_running_loop()
        self._loop = loop if self._beginning or self._running else None
        if self._loop is not None:
            loop.call_soon(self._take_turn)
