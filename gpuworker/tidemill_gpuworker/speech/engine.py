"""The engine for speech: a window of each job, encoded once, then one token of all in a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.step_cost import StepFeatures
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.engine import EngineFigures
from tidemill_gpuworker.engine.sequence import PriorityClass
from tidemill_gpuworker.memory.no_cache import PlainQueue
from tidemill_gpuworker.pooling.engine import Done
from tidemill_gpuworker.speech.job import SpeechJob
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.scribe import Scribe
from tidemill_gpuworker.speech.vocabulary import Vocabulary
from tidemill_gpuworker.speech.window import Window
from tidemill_gpuworker.steps.cost_learner import CostLearner

#: Windows encoded in one step: more would let the others wait for their tokens.
_MAX_ENCODED = 4
#: Encoder positions of a window, and the share of the decoder's context that a prompt may have.
_POSITIONS = 1500


@dataclass(frozen=True, slots=True)
class SpeechOutput:
    """A window that was read, and the end of the job if it was the last one."""

    seq: SpeechJob
    new_ids: tuple[int, ...]
    text: str
    finish: Done | None
    outcome: Outcome | None
    logprobs: None = None


class SpeechEngine:
    """Takes jobs in the order of their classes and arrival, ``max_num_seqs`` windows at once.

    Not thread-safe: one thread adds, aborts and steps.
    """

    def __init__(
        self,
        model: SpeechModel,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        max_num_seqs: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepFeatures], None] = lambda step: None,
    ) -> None:
        self.figures = EngineFigures()
        self.learner = CostLearner()
        self._model = model
        self._vocabulary = vocabulary
        self._scribe = Scribe(model, vocabulary, tokenizer)
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._on_step = on_step
        #: The windows under way; the place of each is its slot in the model.
        self._windows: list[Window] = []
        self._waiting: dict[str, SpeechJob] = {}
        self.step_scheduler = PlainQueue(self._windows, self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a job is in here."""
        return bool(self._windows or self._waiting)

    def add(self, work: SpeechJob) -> None:
        """Take in a job."""
        self._waiting[work.seq_id] = work
        self._count_waiting()

    def abort(self, seq_id: str) -> SpeechJob | None:
        """Drop a job; returns it, or None if it has ended or was never here."""
        job = self._waiting.pop(seq_id, None)
        for slot, window in enumerate(self._windows):
            if window.job.seq_id == seq_id:
                job = window.job
                self._free(slot)
                break
        self._count_waiting()
        return job

    def step(self) -> list[SpeechOutput]:
        """Begin windows where there is room, and give each window one token.

        Returns the windows that were read to their end.  If the model raises, abort all jobs and
        add them again.
        """
        started = self._clock()
        ended = [job for job in self._waiting.values() if job.is_done]
        outputs = [self._end(job) for job in ended]
        begun = self._begin()
        num_decoded = self._decode([w for w in self._windows if w not in begun])
        for window in [window for window in self._windows if window.is_over]:
            if (output := self._finish(window)) is not None:
                outputs.append(output)
        self._note(len(begun), num_decoded, self._clock() - started)
        return outputs

    def _begin(self) -> list[Window]:
        room = min(self._max_num_seqs - len(self._windows), _MAX_ENCODED)
        jobs = sorted(self._waiting.values(), key=lambda job: job.priority_class)[: max(0, room)]
        if not jobs:
            return []
        first = len(self._windows)
        self._model.encode([job.audio.window(job.seek) for job in jobs], first)
        for slot, job in enumerate(jobs, first):
            del self._waiting[job.seq_id]
            self._windows.append(self._scribe.open(job, slot))
            self._prefill(slot)
        return self._windows[first:]

    def _prefill(self, slot: int) -> None:
        window = self._windows[slot]
        ids = window.start_ids
        hidden = self._model.decode(torch.tensor([ids]), [0], slot).hidden[0]
        start = len(window.prompt)
        logits = self._model.logits(hidden[[start, -1]])
        window.hear(logits[0])
        window.num_decoded = len(ids)
        window.take(logits[1])

    def _decode(self, windows: Sequence[Window]) -> int:
        # Windows that began in this step have their token, and the slots behind the others.
        if not windows:
            return 0
        last = torch.tensor([[window.sampled[-1]] for window in windows])
        starts = [window.num_decoded for window in windows]
        hidden = self._model.decode(last, starts, 0).hidden[:, 0]
        for window, logits in zip(windows, self._model.logits(hidden), strict=True):
            window.num_decoded += 1
            window.take(logits)
        return len(windows)

    def _finish(self, window: Window) -> SpeechOutput | None:
        slot = self._windows.index(window)
        if window.needs_another_try(self._scribe.plain_text(window)):
            window.start_again()
            self._prefill(slot)
            return None
        job = window.job
        new_ids, text = self._scribe.close(window, slot)
        self._free(slot)
        self.figures.num_generated_tokens += len(new_ids)
        job.output_ids += new_ids
        if job.is_done:
            return SpeechOutput(job, new_ids, text, Done(), job.outcome())
        self._waiting[job.seq_id] = job
        return SpeechOutput(job, new_ids, text, None, None)

    def _end(self, job: SpeechJob) -> SpeechOutput:
        del self._waiting[job.seq_id]
        return SpeechOutput(job, (), "", Done(), job.outcome())

    def _free(self, slot: int) -> None:
        last = self._windows.pop()
        if slot < len(self._windows):
            self._model.move(len(self._windows), slot)
            self._windows[slot] = last

    def _note(self, num_begun: int, num_decoded: int, seconds: float) -> None:
        self._count_waiting()
        figures = self.figures
        step = StepFeatures(
            prefill_tokens=num_begun * _POSITIONS, decode_tokens=num_decoded, seconds=seconds
        )
        figures.num_steps += 1
        figures.num_prompt_tokens += step.prefill_tokens
        figures.last_step = step
        figures.total_step_seconds += seconds
        self.learner.observe(step)
        self._on_step(step)

    def _count_waiting(self) -> None:
        queue, jobs = self.step_scheduler, self._waiting.values()
        queue.num_waiting_tokens = sum(job.num_left_tokens for job in jobs)
        queue.num_urgent_tokens = sum(
            job.num_left_tokens for job in jobs if job.priority_class is PriorityClass.INTERACTIVE
        )
