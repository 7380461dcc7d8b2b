"""How a process ends: drained by a signal, with its parent, or on purpose at a crash point."""

import asyncio
import functools
import logging
import os
import select
import signal
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Self

from tidemill.service.config import PARENT_FD_VARIABLE, load_crash_points, take_parent_fd

_log = logging.getLogger(__name__)

#: Exit status of a process that lost its parent, and of one that died at a crash point.
ORPHANED_STATUS = 75
CRASH_STATUS = 9


class StopSignal:
    """A flag that signal handlers may set and that threads and event loops may wait for.

    It is a pipe, not a ``threading.Event``: setting an event in a signal handler deadlocks when
    the interrupted code holds that event's own lock.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._is_set = False
        self._is_open = True

    @property
    def is_set(self) -> bool:
        """Whether ``set`` was called."""
        return self._is_set

    def set(self) -> None:
        """Raise the flag for good; may be repeated."""
        was_set, self._is_set = self._is_set, True
        if not was_set and self._is_open:
            # Never read, so the pipe stays readable and every waiter wakes, now or later.
            os.write(self._write_end, b"!")

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until the flag is up or the time is over; returns whether it is up."""
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        poll.poll(None if timeout_seconds is None else timeout_seconds * 1000)
        return self._is_set

    async def wait_async(self) -> None:
        """Return when the flag is up, the event loop running meanwhile."""
        loop = asyncio.get_running_loop()
        raised: asyncio.Future[None] = loop.create_future()
        # A loop keeps one reader per descriptor; a copy of its own serves each waiter.
        descriptor = os.dup(self._read_end)
        loop.add_reader(descriptor, _resolve, raised)
        try:
            await raised
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Free the pipe; nobody may wait any more. May be repeated."""
        if self._is_open:
            self._is_open = False
            os.close(self._read_end)
            os.close(self._write_end)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Drain:
    """What SIGINT and SIGTERM mean to a process: the first drains it, the second stops it.

    A context manager, to be entered on the main thread, that handles both signals while open.
    A third signal finds the handlers from before, which normally ends the process on the spot.
    """

    def __init__(self) -> None:
        #: Up: claim nothing new, finish what runs.
        self.draining = StopSignal()
        #: Up: hand back what runs and leave.
        self.stopping = StopSignal()
        self._previous: dict[int, object] = {}

    def request(self) -> None:
        """Do what one more signal would do."""
        if self.draining.is_set:
            self.stopping.set()
        self.draining.set()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        self.draining.close()
        self.stopping.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()
        if self.stopping.is_set:
            self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]  # None: not set from Python


class ParentLink:
    """The parent's end of a pipe by which child processes notice its death, SIGKILL included.

    One link serves any number of children: start each with ``pass_fds`` and ``environment``,
    and let it call ``exit_with_parent``. Why a pipe: see ``tidemill.service.deathwatch``.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """For ``subprocess.Popen(pass_fds=...)``."""
        return (self._read_end,)

    @property
    def environment(self) -> dict[str, str]:
        """Variables a child needs besides its own."""
        return {PARENT_FD_VARIABLE: str(self._read_end)}

    def close(self) -> None:
        """Let the children go as if this process had died."""
        os.close(self._write_end)
        os.close(self._read_end)


def exit_with_parent(*, grace_seconds: float = 5.0) -> bool:
    """End this process when the parent that holds our ``ParentLink`` is gone.

    It gets SIGTERM first, so that it may drain, and is ended after ``grace_seconds``. Returns
    False, doing nothing, in a process that was started without a link.
    """
    descriptor = take_parent_fd()
    if descriptor is None:
        return False
    os.set_inheritable(descriptor, False)
    watch = functools.partial(_watch_parent, descriptor, grace_seconds)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    return True


def _watch_parent(descriptor: int, grace_seconds: float) -> None:
    while os.read(descriptor, 64):
        pass
    _log.warning("the parent process is gone, leaving within %g s", grace_seconds)
    os.kill(os.getpid(), signal.SIGTERM)
    # No event announces our own end, and none is needed: the exit of the process ends this wait.
    threading.Event().wait(grace_seconds)
    os._exit(ORPHANED_STATUS)


class CrashPlan:
    """At which pass of which named point a process is to die; counts the passes."""

    def __init__(self, points: Mapping[str, int]) -> None:
        self._remaining = dict(points)

    def is_due(self, name: str) -> bool:
        """Count one pass of ``name``; whether it is the fatal one."""
        if name not in self._remaining:
            return False
        self._remaining[name] -= 1
        return self._remaining[name] == 0


@functools.cache
def _crash_plan() -> CrashPlan:
    return CrashPlan(load_crash_points())


def crash_point(name: str) -> None:
    """Die here without any clean-up if ``TIDEMILL_CRASH_AT`` names this point; for crash tests.

    The variable is a comma-separated list of ``name`` or ``name:N``, the latter meaning the N-th
    pass in this process. Raises ``ConfigError`` at the first point if it is neither.
    """
    if _crash_plan().is_due(name):
        os._exit(CRASH_STATUS)
