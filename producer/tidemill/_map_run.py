"""Where one run of ``map`` is, for both clients; does no I/O but for telling its progress."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from tidemill._checks import check_timeout
from tidemill._items import ItemReader, KeyOf, PromptOf, check_items
from tidemill._request import JobOptions, JobSpec
from tidemill._window import Window
from tidemill.progress import MapProgress, Reporter
from tidemill.protocol.errors import BrokerError, InvalidRequest, JobNotFinished, TidemillError
from tidemill.result import Result

_LOGGER = logging.getLogger("tidemill")

Outcome = Result | TidemillError

#: What ``progress`` may be.
Progress = bool | Callable[[MapProgress], object]


def note_leftovers(error: BaseException, failure: BrokerError) -> None:
    """Say that the jobs of a run that ``error`` has ended could not be cancelled."""
    note = f"map: its jobs in flight may go on: {failure.one_line()}"
    error.add_note(note)
    # Nobody sees the error of a generator that is closed.
    _LOGGER.warning("%s", note)


class MapOptions(JobOptions, total=False):
    """What ``map`` takes beside the items, their prompts and the form of what comes out."""

    max_in_flight: int
    ordered: bool
    key: KeyOf[Any] | None
    key_prefix: str | None
    progress: Progress
    timeout: float | None


class HowToMap(TypedDict):
    """The arguments of ``map`` that say how it runs."""

    prompt: PromptOf[Any] | None
    max_in_flight: int
    ordered: bool
    key: KeyOf[Any] | None
    key_prefix: str | None
    progress: Progress
    timeout: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """An item under way: the job submitted for it, and the one it asks for itself."""

    index: int
    spec: JobSpec
    origin: JobSpec


class MapRun:
    """Numbers items, makes their jobs and gives out ``(item, outcome)`` when its turn has come."""

    def __init__(self, items: object, how: HowToMap, options: JobOptions) -> None:
        check_items(items)
        check_timeout(how["timeout"])
        common: JobOptions = {"stream": False, **options}
        self._reader = ItemReader(common, how["prompt"], how["key"], how["key_prefix"])
        self._window: Window[tuple[Any, Outcome]] = Window(
            how["max_in_flight"], ordered=how["ordered"]
        )
        self._reporter = Reporter(how["progress"], items)
        self._items: dict[int, Any] = {}
        self._num_failed = 0
        self._timeout = how["timeout"]
        self._quiet_since = time.monotonic()

    @property
    def has_room(self) -> bool:
        """Whether another item may start."""
        return self._window.has_room

    @property
    def is_empty(self) -> bool:
        """Whether everything that started has been given out."""
        return self._window.is_empty

    def start(self, item: Any) -> Flight | None:
        """Count an item in and return its job, or None if it has its outcome: it has no job."""
        self.touch()
        index = self._window.start()
        self._items[index] = item
        try:
            spec = self._reader.spec(index, item)
        except InvalidRequest as error:
            self.finish(index, error)
            return None
        return Flight(index, spec, spec)

    def end(self, flight: Flight, outcome: Outcome, *, is_new: bool) -> Flight | None:
        """Note how a job has ended; returns what to run in its place if an earlier run failed it.

        ``is_new`` tells that this run has submitted the job.
        """
        spec = self._reader.retry(flight.origin, outcome, is_new=is_new)
        if spec is not None:
            return Flight(flight.index, spec, flight.origin)
        self.finish(flight.index, outcome)
        return None

    def finish(self, index: int, outcome: Outcome) -> None:
        """Note the outcome of an item."""
        self.touch()
        self._num_failed += isinstance(outcome, TidemillError)
        self._window.finish(index, (self._items.pop(index), outcome))

    def pop(self) -> list[tuple[Any, Outcome]]:
        """Take the items whose turn has come, with their outcomes."""
        window = self._window
        self._reporter.report(window.num_finished, self._num_failed, window.num_in_flight)
        return window.pop()

    def close(self) -> None:
        """End the telling of progress."""
        self._reporter.close()

    def touch(self) -> None:
        """Begin the time anew in which something must happen."""
        self._quiet_since = time.monotonic()

    def seconds_left(self) -> float | None:
        """Return how long to wait for something to happen; raises ``JobNotFinished`` after that."""
        if self._timeout is None:
            return None
        left = self._quiet_since + self._timeout - time.monotonic()
        if left <= 0:
            raise JobNotFinished(
                f"map: no job has ended for {self._timeout:g} s; {self._window.num_in_flight} items"
                " are under way",
                job_id="",
                fix="See with `tidemill status` whether workers run, or raise timeout.",
            )
        return left
