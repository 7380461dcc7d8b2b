"""Finds the job that makes engine steps fail: decisions without an engine."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed step means: jobs to take out of the engine, and the one proven guilty."""

    removed: tuple[str, ...] = ()
    culprit: str | None = None


@dataclass(slots=True)
class _Record:
    """The failed steps that a job had a part in, and what it has achieved since the last one.

    ``num_in_row`` failures lie so close together that they are no accidents.
    """

    num_failures: int = 0
    num_in_row: int = 0
    num_kept: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether the last failure may be forgotten; each one asks for twice as much as before."""
        return self.num_kept >= 1 << max(0, self.num_failures - 1)

    def note_failure(self) -> None:
        """Count a failure."""
        self.num_failures += 1
        self.num_in_row += 1
        self.num_kept = 0

    def note_kept(self) -> None:
        """Count a step that brought something which no failure takes back."""
        self.num_kept += 1
        if self.is_clean:
            self.num_in_row = 0


class Isolation:
    """Admits suspects to the engine one at a time after jobs have failed twice in a row.

    Good steps in between excuse a job only by what it keeps of them, for whatever begins anew
    after a failure has its next one before it: a beam search, a long prompt, a transcription.  A
    suspect on trial is cleared in the same way, a newcomer without failures by its first progress.
    One that makes a step fail in company is set aside and tried again alone, in an empty engine;
    only a job that fails twice alone is guilty.  Since each failure doubles what clears a job, it
    takes part in few of them, as the logarithm of its length.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
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
        """Forget a job that has ended or left the worker."""
        self._records.pop(job_id, None)
        if self._trial == job_id:
            self._trial = None
        for held in (self._suspects, self._set_aside):
            if job_id in held:
                held.remove(job_id)

    def step_failed(self, in_engine: Sequence[str]) -> Verdict:
        """Note a failed step; a job's first failure in a row is taken for an accident."""
        records = [self._records.setdefault(job_id, _Record()) for job_id in in_engine]
        for record in records:
            record.note_failure()
        if all(record.num_in_row < 2 for record in records):
            return Verdict()
        for record in records:
            record.num_in_row = 0
        return self._judge(in_engine)

    def _judge(self, in_engine: Sequence[str]) -> Verdict:
        trial, self._trial = self._trial, None
        if len(in_engine) == 1:
            return Verdict(tuple(in_engine), in_engine[0])
        if trial is not None and trial in in_engine:
            self._set_aside.append(trial)
            return Verdict((trial,))
        self._suspects.extendleft(reversed(in_engine))
        return Verdict(tuple(in_engine))

    def step_worked(self, progressed: Collection[str], kept: Collection[str]) -> None:
        """Note a step that ran, and the jobs that got on by it.

        ``kept`` are those of them of whom it brought something that outlives a failure, a token
        that is told or the end.
        """
        for job_id in kept:
            if (record := self._records.get(job_id)) is not None:
                record.note_kept()
        trial = self._trial
        if trial is not None and trial in progressed and self._is_cleared(trial):
            self._trial = None

    def _is_cleared(self, job_id: str) -> bool:
        record = self._records.get(job_id)
        return record is None or record.is_clean

    def next_trial(self, num_in_engine: int) -> str | None:
        """The job to admit now, if it is time for one."""
        if self._trial is not None:
            return None
        if self._set_aside:
            self._trial = None if num_in_engine else self._set_aside.popleft()
        elif self._suspects:
            self._trial = self._suspects.popleft()
        return self._trial
