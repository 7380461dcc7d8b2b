"""``Producer.map``: many jobs, a bounded number of them at once, on one thread."""

import time
from collections import deque
from collections.abc import Iterable, Iterator

from tidemill._link import Link
from tidemill._receipt import Receipt
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill._results import LONG_SECONDS, ResultGroup
from tidemill._submitter import Submitter
from tidemill._window import Window
from tidemill.protocol.errors import Overloaded, TidemillError
from tidemill.result import Result

#: For so long items are gathered before they are submitted together.
_GATHER_SECONDS = 0.005

Outcome = Result | TidemillError


class Bulk:
    """One run of ``map``; ``abandoned`` names the unfinished jobs that nobody could find again."""

    def __init__(
        self,
        link: Link,
        submitter: Submitter,
        items: Iterable[Prompt | JobSpec],
        options: JobOptions,
        window: Window[Outcome],
    ) -> None:
        self._submitter = submitter
        self._source = (JobSpec.of(item, options) for item in items)
        self._is_exhausted = False
        self._window = window
        self._group = ResultGroup(link, submitter)
        self._indices: dict[str, list[int]] = {}
        self._keyed: set[str] = set()
        self._refused: deque[tuple[int, JobSpec]] = deque()
        self._retry_at = 0.0

    @property
    def abandoned(self) -> set[str]:
        """Ids of the jobs that have no outcome yet and no idempotency key."""
        return self._indices.keys() - self._keyed

    def run(self) -> Iterator[Outcome]:
        """Submit, wait and yield until every item has its outcome."""
        with self._group:
            while True:
                # Before more is submitted: an error in here ends the run.
                yield from self._window.pop()
                self._submit(self._gather())
                yield from self._window.pop()
                if self._is_exhausted and self._window.is_empty:
                    return
                for job_id, outcome in self._group.wait(self._wait_seconds()).items():
                    self._keyed.discard(job_id)
                    for index in self._indices.pop(job_id):
                        self._window.finish(index, outcome)

    def _gather(self) -> list[tuple[int, JobSpec]]:
        batch: list[tuple[int, JobSpec]] = []
        now = time.monotonic()
        if now >= self._retry_at:
            batch += self._refused
            self._refused.clear()
        while self._can_pull and time.monotonic() < now + _GATHER_SECONDS:
            spec = next(self._source, None)
            if spec is None:
                self._is_exhausted = True
            else:
                batch.append((self._window.start(), spec))
        return batch

    def _submit(self, batch: list[tuple[int, JobSpec]]) -> None:
        if not batch:
            return
        receipts = self._submitter.submit_many([spec for _, spec in batch])
        for (index, spec), receipt in zip(batch, receipts, strict=True):
            if isinstance(receipt, Receipt):
                self._await(index, receipt, spec)
            elif isinstance(receipt, Overloaded):
                self._refused.append((index, spec))
                self._retry_at = time.monotonic() + receipt.retry_after_seconds
            else:
                self._window.finish(index, receipt)

    def _await(self, index: int, receipt: Receipt, spec: JobSpec) -> None:
        if spec.has_key:
            self._keyed.add(receipt.job_id)
        indices = self._indices.setdefault(receipt.job_id, [])
        indices.append(index)
        if len(indices) == 1:
            self._group.add(receipt.job_id, receipt, is_fresh=receipt.created)

    @property
    def _can_pull(self) -> bool:
        return self._window.has_room and not self._is_exhausted and not self._refused

    def _wait_seconds(self) -> float:
        if self._can_pull:
            return 0.0
        if self._refused:
            return max(0.0, self._retry_at - time.monotonic())
        return LONG_SECONDS
