"""Runs jobs of several outputs on an engine of single sequences."""

from typing import Any, cast

from tidemill.protocol.errors import CannotGoOn
from tidemill_gpuworker.engine.beam_group import BeamEngine, BeamGroup
from tidemill_gpuworker.engine.choice_group import ChoiceGroup
from tidemill_gpuworker.engine.job_engine import JobEngine, Work, WorkOutput


class GroupEngine:
    """An engine to which a group of sequences is one job; all others pass through.

    Used like the engine below it, by the same thread.
    """

    def __init__(self, engine: JobEngine) -> None:
        self.inner = engine
        # Groups are made for engines of sequences alone.
        self._beams = cast(BeamEngine, engine)
        self._groups: dict[str, ChoiceGroup | BeamGroup] = {}

    @property
    def num_followers(self) -> int:
        """Sequences that will begin once another one has computed their prompt."""
        return sum(len(s.followers) for group in self._groups.values() for s in group.sequences)

    def add(self, work: Any) -> None:
        """Take in a job; raises ``InvalidRequest`` if it can never run."""
        if not isinstance(work, ChoiceGroup | BeamGroup):
            self.inner.add(work)
            return
        self._groups[work.seq_id] = work
        try:
            for seq in work.starters():
                self.inner.add(seq)
        except BaseException:
            self.abort(work.seq_id)
            raise

    def abort(self, seq_id: str) -> Work | None:
        """Drop a job; returns it, or None if it has ended or was never here."""
        group = self._groups.pop(seq_id, None)
        if group is None:
            return self.inner.abort(seq_id)
        for seq in group.sequences:
            self.inner.abort(seq.seq_id)
        return group

    def step(self) -> list[WorkOutput]:
        """Run one step; if it raises, abort all jobs and add them again."""
        try:
            outputs = self.inner.step()
        except CannotGoOn as error:
            raise error.of(tuple(dict.fromkeys(map(self._job_of, error.seq_ids)))) from error
        told: list[WorkOutput] = []
        for output in outputs:
            told += self._take(output)
        return told

    def _take(self, output: Any) -> list[WorkOutput]:
        group = self._groups.get(self._job_of(output.seq.seq_id))
        if group is None:
            return [output]
        told = group.take(output, self._beams)
        if told and told[-1].finish is not None:
            del self._groups[group.seq_id]
        return list(told)

    def _job_of(self, seq_id: str) -> str:
        job_id = seq_id.partition("#")[0]
        return job_id if job_id in self._groups else seq_id
