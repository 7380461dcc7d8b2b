"""Jobs on their way into the queue in groups, and what became of each; pure, for both clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tidemill._checks import shown
from tidemill._receipt import Receipt
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill._terms import check_batch
from tidemill.batch import CancelCounts
from tidemill.protocol.calls import NewJob
from tidemill.protocol.errors import BrokerError, InvalidRequest, Overloaded, TidemillError


class Handle(Protocol):
    """Of a queued job."""

    @property
    def id(self) -> str:
        """The job's id."""


H = TypeVar("H", bound=Handle)

Made = NewJob | InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    place: int
    spec: JobSpec


class Collection(Generic[H]):
    """What waits, the group that is being sent, and in their places what came of those sent."""

    def __init__(self, tenant: str, name: str | None, size: int, options: JobOptions) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidRequest(f"size: {shown(size)} is not 1 or more", field="size")
        self.name = None if name is None else check_batch(name)
        named: JobOptions = {} if name is None else {"batch": name}
        self._common: JobOptions = {**options, **named}
        self._tenant = tenant
        self._size = size
        self._waiting: list[_Entry] = []
        self._group: list[_Entry] = []
        #: The jobs of the group, once they were made, some of which may be queued: their ids are
        #: chosen once, so that none is queued twice.
        self.made: list[Made] = []
        self._specs: list[JobSpec] = []
        self._outcomes: list[H | TidemillError | None] = []

    def add(self, prompt: Prompt | JobSpec, options: JobOptions) -> int:
        """Let a job wait; returns its place.  Raises ``InvalidRequest``, and it does not wait."""
        spec = JobSpec.of(prompt, options).with_defaults(self._common)
        spec.draft(self._tenant)
        place = len(self._specs)
        self._specs.append(spec)
        self._outcomes.append(None)
        self._waiting.append(_Entry(place, spec))
        return place

    @property
    def required_name(self) -> str:
        """The name; raises ``InvalidRequest`` if there is none."""
        if self.name is None:
            raise InvalidRequest(
                "batch: it has no name to count by",
                field="batch",
                fix='Give it one: producer.batch("night").',
            )
        return self.name

    @property
    def is_full(self) -> bool:
        """Whether a group waits."""
        return len(self._waiting) >= self._size

    @property
    def outcomes(self) -> list[H | TidemillError]:
        """The handles of queued jobs, or why they were refused, in the order of their places."""
        return [outcome for outcome in self._outcomes if outcome is not None]

    def next_specs(self) -> list[JobSpec]:
        """Return the specs of the group to send now; empty if nothing waits."""
        if not self._group:
            self._group, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        return [entry.spec for entry in self._group]

    def take(
        self, receipts: Sequence[Receipt | TidemillError], handle: Callable[[Receipt], H]
    ) -> tuple[list[TidemillError], float]:
        """Note what came of the group; those that the queue has no room for stay in it.

        Returns the errors of those that were refused, and how many seconds to wait before the
        others are sent.
        """
        left: list[tuple[_Entry, Made]] = []
        refused: list[TidemillError] = []
        seconds = 0.0
        for entry, job, receipt in zip(self._group, self.made, receipts, strict=True):
            if isinstance(receipt, Receipt):
                self._outcomes[entry.place] = handle(receipt)
            elif isinstance(receipt, Overloaded):
                left.append((entry, job))
                seconds = max(seconds, receipt.retry_after_seconds)
            else:
                self._outcomes[entry.place] = receipt
                refused.append(receipt)
        self._group, self.made = [entry for entry, _ in left], [job for _, job in left]
        return refused, seconds

    def unsure(self) -> list[NewJob]:
        """Return the jobs that may be queued or not, and that nobody could find again."""
        pairs = zip(self._group, self.made, strict=False)
        return [job for entry, job in pairs if isinstance(job, NewJob) and not entry.spec.has_key]

    def unkeyed_ids(self) -> list[str]:
        """Return the ids of the queued jobs that nobody could find again."""
        pairs = zip(self._specs, self._outcomes, strict=True)
        return [
            outcome.id
            for spec, outcome in pairs
            if outcome is not None and not isinstance(outcome, TidemillError) and not spec.has_key
        ]

    def forget(self) -> None:
        """Let nothing wait any more."""
        self._waiting, self._group, self.made = [], [], []

    def undone(self, counts: CancelCounts) -> str:
        """Say exactly what became of all jobs after those without a key were cancelled."""
        sent = zip(self._specs, self._outcomes, strict=True)
        told = {
            "cancelled": counts.cancelled,
            "ended before": counts.ended,
            "refused": self._num_refused,
            "with an idempotency key in the queue": sum(
                spec.has_key and not isinstance(outcome, TidemillError | None)
                for spec, outcome in sent
            ),
            "with an idempotency key perhaps in the queue": len(self.made) - len(self.unsure()),
        }
        told["never queued"] = len(self._specs) - sum(told.values())
        return f"batch: {len(self._specs)} jobs: {_listed(told)}"

    def cut_off(self, error: BrokerError) -> str:
        """Say exactly what became of all jobs once the broker stays away."""
        told = {
            "queued": len(self.outcomes) - self._num_refused,
            "refused": self._num_refused,
            "perhaps queued": len(self.made),
        }
        told["not sent"] = len(self._specs) - sum(told.values())
        return (
            f"batch: {len(self._specs)} jobs: {_listed(told)}; {error.one_line()} Then send() goes"
            " on and queues none twice, and cancel() ends what was queued."
        )

    @property
    def _num_refused(self) -> int:
        return sum(isinstance(outcome, TidemillError) for outcome in self._outcomes)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "none"
