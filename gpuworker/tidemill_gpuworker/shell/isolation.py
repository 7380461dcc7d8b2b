"""Finds the job that makes engine steps fail: decisions without an engine."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed step means: jobs to take out of the engine, and the one proven guilty."""

    removed: tuple[str, ...] = ()
    culprit: str | None = None


class Isolation:
    """Admits suspects to the engine one at a time after steps have failed twice in a row.

    A suspect is cleared by its first token and stays. One that makes a step fail in company is
    set aside and tried again alone, in an empty engine; only a job that fails alone is guilty.
    So a poison prompt ends, and neither it nor a batch that is too large harms its neighbours.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._suspects: deque[str] = deque()
        self._set_aside: deque[str] = deque()
        self._trial: str | None = None

    @property
    def num_held(self) -> int:
        """Jobs that are kept out of the engine."""
        return len(self._suspects) + len(self._set_aside)

    @property
    def is_active(self) -> bool:
        """Whether jobs may enter the engine only as ``next_trial`` says."""
        return bool(self._trial or self._suspects or self._set_aside)

    def hold(self, job_id: str) -> None:
        """Let a job that came in meanwhile wait for its turn."""
        self._suspects.append(job_id)

    def discard(self, job_id: str) -> None:
        """Forget a job that has left the worker."""
        if self._trial == job_id:
            self._trial = None
        for held in (self._suspects, self._set_aside):
            if job_id in held:
                held.remove(job_id)

    def step_failed(self, in_engine: Sequence[str]) -> Verdict:
        """Note a failed step; the first failure in a row is taken for an accident."""
        self._num_failures += 1
        if self._num_failures < 2 or not in_engine:
            return Verdict()
        self._num_failures = 0
        if len(in_engine) == 1:
            self._trial = None
            return Verdict(tuple(in_engine), in_engine[0])
        trial, self._trial = self._trial, None
        if trial is not None and trial in in_engine:
            self._set_aside.append(trial)
            return Verdict((trial,))
        self._suspects.extendleft(reversed(in_engine))
        return Verdict(tuple(in_engine))

    def step_worked(self, progressed: Collection[str]) -> None:
        """Note a step that ran, and the jobs that got a token from it or ended."""
        self._num_failures = 0
        if self._trial in progressed:
            self._trial = None

    def next_trial(self, num_in_engine: int) -> str | None:
        """The job to admit now, if it is time for one."""
        if self._trial is not None:
            return None
        if self._set_aside:
            self._trial = None if num_in_engine else self._set_aside.popleft()
        elif self._suspects:
            self._trial = self._suspects.popleft()
        return self._trial
