"""``Producer.map``: many jobs, a bounded number of them at once, on one thread."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

from tidemill._link import Link
from tidemill._map_run import Flight, MapRun, Outcome, note_leftovers
from tidemill._receipt import Receipt
from tidemill._results import LONG_SECONDS, ResultGroup
from tidemill._submitter import Submitter
from tidemill._sweep import cancel_jobs
from tidemill.protocol.calls import NewJob
from tidemill.protocol.errors import BrokerError, InvalidRequest, Overloaded, TidemillError
from tidemill.protocol.keys import ShardKeys

#: For so long items are gathered before they are submitted together.
_GATHER_SECONDS = 0.005

_NO_MORE = object()


class Bulk:
    """One run of ``map``."""

    def __init__(
        self,
        link: Link,
        keys: ShardKeys,
        submitter: Submitter,
        items: Iterable[Any],
        run: MapRun,
    ) -> None:
        self._link = link
        self._keys = keys
        self._submitter = submitter
        self._items = items
        self._run = run
        self._is_exhausted = False
        self._group = ResultGroup(link, submitter)
        self._flights: dict[str, list[Flight]] = {}
        #: Ids of the jobs that this run has submitted.
        self._new: set[str] = set()
        self._refused: deque[Flight] = deque()
        self._retry_at = 0.0
        #: What is being sent: it may be queued, or not.
        self._sending: list[tuple[Flight, NewJob | InvalidRequest]] = []

    def outcomes(self) -> Generator[tuple[Any, Outcome], None, None]:
        """Submit, wait and yield until every item has its outcome."""
        source = iter(self._items)
        run = self._run
        with closing(run), self._group:
            run.touch()
            while True:
                # Before more is submitted: an error in here ends the run.
                yield from self._give_out()
                self._submit(self._gather(source))
                yield from self._give_out()
                if self._is_exhausted and run.is_empty:
                    return
                self._wait()

    def abandon(self) -> None:
        """Cancel what is under way and what nobody could find again."""
        lost = [
            job
            for flight, job in self._sending
            if isinstance(job, NewJob) and not flight.spec.has_key
        ]
        if lost:
            # However far the sending got: once this is answered, nothing of it is on its way.
            self._submitter.send(lost)
        ids = [job.job_id for job in lost]
        ids += [
            job_id
            for job_id, flights in self._flights.items()
            if not any(flight.spec.has_key for flight in flights)
        ]
        for job_id in ids:
            self._submitter.fates.cancel(job_id)
        self._link.carry_out(cancel_jobs(self._keys, list(dict.fromkeys(ids))))

    def _give_out(self) -> Iterator[tuple[Any, Outcome]]:
        for pair in self._run.pop():
            yield pair
            # What the caller does with an outcome is not the queue's silence.
            self._run.touch()

    def _gather(self, source: Iterator[Any]) -> list[Flight]:
        batch: list[Flight] = []
        now = time.monotonic()
        if now >= self._retry_at:
            batch += self._refused
            self._refused.clear()
        while self._can_pull and time.monotonic() < now + _GATHER_SECONDS:
            item = next(source, _NO_MORE)
            if item is _NO_MORE:
                self._is_exhausted = True
            elif (flight := self._run.start(item)) is not None:
                batch.append(flight)
        return batch

    def _submit(self, batch: list[Flight]) -> None:
        if not batch:
            return
        made = self._submitter.make([flight.spec for flight in batch])
        self._sending = list(zip(batch, made, strict=True))
        for flight, receipt in zip(batch, self._submitter.send(made), strict=True):
            if isinstance(receipt, Receipt):
                self._await(flight, receipt)
            elif isinstance(receipt, Overloaded):
                self._refused.append(flight)
                self._retry_at = time.monotonic() + receipt.retry_after_seconds
            else:
                self._run.finish(flight.index, receipt)
        self._sending = []

    def _await(self, flight: Flight, receipt: Receipt) -> None:
        flights = self._flights.setdefault(receipt.job_id, [])
        flights.append(flight)
        if receipt.created:
            self._new.add(receipt.job_id)
        if len(flights) == 1:
            self._group.add(receipt.job_id, receipt, is_fresh=receipt.created)

    def _wait(self) -> None:
        for job_id, outcome in self._group.wait(self._wait_seconds()).items():
            is_new = job_id in self._new
            self._new.discard(job_id)
            for flight in self._flights.pop(job_id):
                again = self._run.end(flight, outcome, is_new=is_new)
                if again is not None:
                    self._refused.append(again)

    @property
    def _can_pull(self) -> bool:
        return self._run.has_room and not self._is_exhausted and not self._refused

    def _wait_seconds(self) -> float:
        if self._can_pull:
            return 0.0
        patience = self._run.seconds_left()
        seconds = LONG_SECONDS if patience is None else patience
        if self._refused:
            seconds = min(seconds, self._retry_at - time.monotonic())
        return max(0.0, seconds)


def deliver(bulk: Bulk, *, return_exceptions: bool, with_items: bool) -> Generator[Any, None, None]:
    """Yield what ``map`` does; however it ends early, nothing of it goes on unheeded."""
    try:
        with closing(bulk.outcomes()) as outcomes:
            for item, outcome in outcomes:
                if isinstance(outcome, TidemillError) and not return_exceptions:
                    raise outcome
                yield (item, outcome) if with_items else outcome
    except BrokerError:
        raise
    except BaseException as error:
        try:
            bulk.abandon()
        except BrokerError as failure:
            note_leftovers(error, failure)
        raise
