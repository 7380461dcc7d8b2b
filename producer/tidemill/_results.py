"""Waiting for many jobs at once, on one connection."""

import time
from types import TracebackType
from typing import Self

from tidemill._await_result import ResultFollower
from tidemill._link import Link
from tidemill._listener import TICK_SECONDS, Listener, Notice, pass_on
from tidemill._reads import LogPage, Outcome, naming
from tidemill._receipt import Receipt
from tidemill._submitter import Submitter
from tidemill.protocol.errors import (
    JobError,
    JobNotFound,
    Overloaded,
    ProtocolError,
    ResultExpired,
    TidemillError,
)
from tidemill.result import Result, outcome_of

#: A wait without an end is cut into waits of so many seconds.
LONG_SECONDS = 3600.0


class ResultGroup:
    """The jobs one thread is waiting for; finished ones leave the group."""

    def __init__(self, link: Link, submitter: Submitter) -> None:
        self._link = link
        self._submitter = submitter
        self._listener = Listener(link.client)
        self._followers: dict[str, ResultFollower] = {}
        self._receipts: dict[str, Receipt] = {}
        #: Lost jobs for which the queue had no room, and when to submit them again.
        self._refused: list[ResultFollower] = []
        self._retry_at = 0.0

    def add(self, job_id: str, receipt: Receipt | None = None, *, is_fresh: bool = False) -> None:
        """Wait for this job too; ``is_fresh`` if it was submitted just now.

        With a ``receipt`` it is submitted again if the server loses it.
        """
        follower = ResultFollower(job_id, is_fresh=is_fresh)
        self._followers[follower.channel] = follower
        if receipt is not None:
            self._receipts[job_id] = receipt
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
            notice = self._listener.get(min(left, TICK_SECONDS, self._seconds_to_retry()))
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
        self._retry_refused()
        finished: dict[str, Result | TidemillError] = {}
        while due := [f for f in self._followers.values() if f.must_read]:
            reads = [follower.next_read() for follower in due]
            outcomes = {
                follower: _take_reply(follower, reply)
                for follower, reply in zip(due, self._link.read_many(reads), strict=True)
            }
            self._bring_back(outcomes)
            for follower, outcome in outcomes.items():
                if outcome is not None:
                    finished[follower.job_id] = outcome
                    self._forget(follower)
                elif not follower.must_read:
                    self._listener.add(follower.channel)
        return finished

    def _bring_back(self, outcomes: dict[ResultFollower, Result | TidemillError | None]) -> None:
        """Submit again what is missing, and take back its outcome if that is right."""
        lost = [
            follower
            for follower, outcome in outcomes.items()
            if isinstance(outcome, JobNotFound)
            and not isinstance(outcome, ResultExpired)
            and follower.job_id in self._receipts
        ]
        if not lost:
            return
        problems = self._submitter.resubmit([self._receipts[f.job_id] for f in lost])
        for follower, problem in zip(lost, problems, strict=True):
            follower.start_over()
            if isinstance(problem, Overloaded):
                follower.must_read, outcomes[follower] = False, None
                self._refused.append(follower)
                self._retry_at = time.monotonic() + problem.retry_after_seconds
            else:
                outcomes[follower] = problem

    def _seconds_to_retry(self) -> float:
        return max(0.0, self._retry_at - time.monotonic()) if self._refused else TICK_SECONDS

    def _retry_refused(self) -> None:
        if self._refused and time.monotonic() >= self._retry_at:
            for follower in self._refused:
                follower.must_read = True
            self._refused.clear()

    def _take(self, notice: Notice | None) -> None:
        if notice is None or not notice.channel:
            for follower in self._followers.values():
                follower.must_read = follower not in self._refused
        elif notice.channel in self._followers:
            pass_on(notice, self._followers[notice.channel])

    def _forget(self, follower: ResultFollower) -> None:
        del self._followers[follower.channel]
        if (receipt := self._receipts.pop(follower.job_id, None)) is not None:
            receipt.fate.has_ended = True
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
