"""The engine for embeddings and scores: whole inputs, several jobs in a step, no tokens out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.step_cost import StepFeatures
from tidemill.service.job_inputs import EncoderInput
from tidemill_gpuworker.engine.engine import EngineFigures
from tidemill_gpuworker.engine.sequence import PriorityClass
from tidemill_gpuworker.memory.no_cache import PlainQueue
from tidemill_gpuworker.pooling.batches import buckets, take
from tidemill_gpuworker.pooling.job import PoolingJob
from tidemill_gpuworker.steps.cost_learner import CostLearner
from tidemill_gpuworker.steps.step_features import prefill_pairs


class Encoder(Protocol):
    """Puts inputs through the model."""

    def rows(self, batch: Sequence[EncoderInput], /) -> torch.Tensor:
        """Return one row for each input."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of every pooling job."""

    reason: str = "stop"
    stop_reason: None = None


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """A job whose last input went through the model in this step."""

    seq: PoolingJob
    outcome: Outcome
    finish: Done = field(default_factory=Done)
    new_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: None = None


class PoolingEngine:
    """Takes inputs in the order of their jobs' classes and arrival, so many tokens a step.

    A job with many inputs takes several steps.  Not thread-safe: one thread adds, aborts and steps.
    """

    def __init__(
        self,
        encoder: Encoder,
        max_num_batched_tokens: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepFeatures], None] = lambda step: None,
    ) -> None:
        self.figures = EngineFigures()
        self.learner = CostLearner()
        self._encoder = encoder
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._on_step = on_step
        self._jobs: dict[str, PoolingJob] = {}
        self._begun: dict[str, None] = {}
        self._fresh: dict[str, None] = {}
        self.step_scheduler = PlainQueue(self._begun, self._fresh)

    @property
    def has_work(self) -> bool:
        """Whether a job is in here."""
        return bool(self._jobs)

    def add(self, work: PoolingJob) -> None:
        """Take in a job."""
        self._jobs[work.seq_id] = work
        self._fresh[work.seq_id] = None
        self._count_waiting()

    def abort(self, seq_id: str) -> PoolingJob | None:
        """Drop a job; returns it, or None if it has ended or was never here."""
        self._begun.pop(seq_id, None)
        self._fresh.pop(seq_id, None)
        job = self._jobs.pop(seq_id, None)
        self._count_waiting()
        return job

    def step(self) -> list[PoolingOutput]:
        """Put a budget of tokens through the model; returns the jobs that ended.

        If the model raises, the step never happened.
        """
        started = self._clock()
        chosen = self._choose()
        rows = self._encode([item for _, item in chosen])
        _check_finite([job for job, _ in chosen], rows)
        for (job, _), row in zip(chosen, rows, strict=True):
            job.take(row)
        outputs = [
            self._end(job) for job in dict.fromkeys(job for job, _ in chosen) if not job.left
        ]
        self._note([item for _, item in chosen], self._clock() - started)
        return outputs

    def _choose(self) -> list[tuple[PoolingJob, EncoderInput]]:
        # Sorting is stable: within a class the jobs keep the order in which they came.
        jobs = sorted(self._jobs.values(), key=lambda job: job.priority_class)
        chosen: list[tuple[PoolingJob, EncoderInput]] = []
        room = self._budget
        for job in jobs:
            if room <= 0:
                break
            lengths = [len(item.ids) for item in job.left]
            if chosen and lengths[0] > room:
                break
            count = take(lengths, room)
            chosen += [(job, item) for item in job.left[:count]]
            room -= sum(lengths[:count])
            self._fresh.pop(job.seq_id, None)
            self._begun[job.seq_id] = None
        return chosen

    def _encode(self, items: Sequence[EncoderInput]) -> list[torch.Tensor]:
        rows: dict[int, torch.Tensor] = {}
        for bucket in buckets([len(item.ids) for item in items]):
            batch = self._encoder.rows([items[index] for index in bucket])
            rows.update(zip(bucket, batch, strict=True))
        return [rows[index] for index in range(len(items))]

    def _end(self, job: PoolingJob) -> PoolingOutput:
        output = PoolingOutput(job, job.outcome())
        self.abort(job.seq_id)
        return output

    def _note(self, items: Sequence[EncoderInput], seconds: float) -> None:
        self._count_waiting()
        lengths = [len(item.ids) for item in items]
        step = StepFeatures(
            prefill_tokens=sum(lengths),
            prefill_pairs=sum(prefill_pairs(0, length) for length in lengths),
            seconds=seconds,
        )
        figures = self.figures
        figures.num_steps += 1
        figures.num_prompt_tokens += step.prefill_tokens
        figures.last_step = step
        figures.total_step_seconds += seconds
        self.learner.observe(step)
        self._on_step(step)

    def _count_waiting(self) -> None:
        queue, jobs = self.step_scheduler, self._jobs.values()
        queue.num_waiting_tokens = sum(job.num_left_tokens for job in jobs)
        queue.num_urgent_tokens = sum(
            job.num_left_tokens for job in jobs if job.priority_class is PriorityClass.INTERACTIVE
        )


def _check_finite(jobs: Sequence[PoolingJob], rows: Sequence[torch.Tensor]) -> None:
    """Raise ``ArithmeticError`` if a row holds what is no number."""
    broken = {job.seq_id for job, row in zip(jobs, rows, strict=True) if not row.isfinite().all()}
    if broken:
        raise ArithmeticError(f"the model gave no finite rows for {', '.join(sorted(broken))}")
