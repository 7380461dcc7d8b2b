"""Waiting for many jobs at once, on one connection."""

import time
from types import TracebackType
from typing import Self

from tidemill._await_result import ResultFollower
from tidemill._link import Link
from tidemill._listener import TICK_SECONDS, Listener, Notice, pass_on
from tidemill._reads import LogPage, Outcome, naming
from tidemill.protocol.errors import JobError, ProtocolError, TidemillError
from tidemill.result import Result, outcome_of

#: A wait without an end is cut into waits of so many seconds.
LONG_SECONDS = 3600.0


class ResultGroup:
    """The jobs one thread is waiting for; finished ones leave the group."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._listener = Listener(link.client)
        self._followers: dict[str, ResultFollower] = {}

    def add(self, job_id: str, *, is_fresh: bool = False) -> None:
        """Wait for this job too; ``is_fresh`` if it was submitted just now."""
        follower = ResultFollower(job_id, is_fresh=is_fresh)
        self._followers[follower.channel] = follower
        if is_fresh:
            self._listener.add(follower.channel)

    def __len__(self) -> int:
        return len(self._followers)

    def wait(self, timeout: float) -> dict[str, Result | TidemillError]:
        """Return what finished, by job id; empty if nothing did within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if finished := self._read():
                return finished
            left = max(0.0, deadline - time.monotonic())
            notice = self._listener.get(min(left, TICK_SECONDS))
            if notice is None and not left:
                return {}
            self._take(notice)

    def close(self) -> None:
        """Give the connection back."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Result | TidemillError]:
        finished: dict[str, Result | TidemillError] = {}
        while due := [f for f in self._followers.values() if f.must_read]:
            reads = [follower.next_read() for follower in due]
            for follower, reply in zip(due, self._link.read_many(reads), strict=True):
                outcome = _take_reply(follower, reply)
                if outcome is not None:
                    finished[follower.job_id] = outcome
                    self._forget(follower)
                elif not follower.must_read:
                    self._listener.add(follower.channel)
        return finished

    def _take(self, notice: Notice | None) -> None:
        if notice is None or not notice.channel:
            for follower in self._followers.values():
                follower.must_read = True
        elif notice.channel in self._followers:
            pass_on(notice, self._followers[notice.channel])

    def _forget(self, follower: ResultFollower) -> None:
        del self._followers[follower.channel]
        self._listener.discard(follower.channel)


def _take_reply(
    follower: ResultFollower, reply: LogPage | Outcome | ProtocolError
) -> Result | TidemillError | None:
    try:
        with naming(follower.job_id):
            if isinstance(reply, ProtocolError):
                raise reply
            follower.take_reply(reply)
    except (JobError, ProtocolError) as error:
        return error
    return None if follower.result is None else outcome_of(follower.result)
