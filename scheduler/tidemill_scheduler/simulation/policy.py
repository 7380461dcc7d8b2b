"""What the simulator asks of a policy: the methods of the production scheduler."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerInfo, WorkerStatus
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.hints import Hint
from tidemill_scheduler.policy.placement import Dispatch


class Policy(Protocol):
    """Decides which waiting job goes to which worker, and when.

    ``tick`` may leave work for another call; it then sets ``is_unfinished`` or returns as many
    dispatches as it ever does.
    """

    @property
    def is_unfinished(self) -> bool:
        """Whether another tick can decide more at once."""

    def add_job(self, job: WaitingJob) -> WaitingJob | None:
        """Let a job wait."""

    def forget(self, job_id: str) -> bool:
        """Forget a job that has ended; false if it does not wait."""

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        """Let a worker take jobs."""

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker."""

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Take in what a worker says of itself."""

    def tick(self, now: float) -> Sequence[Dispatch]:
        """Decide what goes out now."""

    def sent(self, dispatch: Dispatch, command_id: str) -> None:
        """The dispatch is on its way as this command."""

    def dropped(self, dispatch: Dispatch) -> None:
        """The job of the dispatch did not wait any more."""


@runtime_checkable
class CacheAware(Protocol):
    """A policy that follows the workers' prefix caches."""

    def apply_kv(self, worker_id: str, events: KvEvents) -> bool:
        """Take in a batch of changes; false if one before it was missed."""

    def reset_kv(self, worker_id: str, snapshot: KvSnapshot) -> None:
        """Replace what is known of a worker's cache."""


@runtime_checkable
class Hinting(Protocol):
    """A policy that tells workers what to keep in their prefix caches."""

    def take_hints(self) -> Sequence[Hint]:
        """Return what changed since the last call."""
