"""The engine: from waiting sequences to new tokens, one step at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.step_cost import StepFeatures
from tidemill_gpuworker.engine.follower_desk import FollowerDesk
from tidemill_gpuworker.engine.job_engine import Finish
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.speculation.figures import SpeculationFigures
from tidemill_gpuworker.speculation.verification import sample_drafted
from tidemill_gpuworker.steps.cost_learner import CostLearner
from tidemill_gpuworker.steps.step_features import features_of
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

Logits = TypeVar("Logits")
LogitsOut = TypeVar("LogitsOut", covariant=True)
LogitsIn = TypeVar("LogitsIn", contravariant=True)


class Runner(Protocol[LogitsOut]):
    """Puts the tokens of a step through the model."""

    def execute(self, plan: StepPlan) -> LogitsOut:
        """Write the KV entries of all scheduled tokens, return the logits of the sampled ones.

        Those are 1 + len(draft) rows for each item of ``plan.sampling``.
        """


class Sampler(Protocol[LogitsIn]):
    """Chooses the next token of each row of logits."""

    def sample(self, logits: LogitsIn, rows: list[Sequence]) -> list[SampledToken]:
        """Return one token per row of logits.

        ``rows`` are the rows' sequences, or ``DraftRow`` where a step has drafts.
        """


class Output(Protocol):
    """What a token added to the text, and whether it was the last one."""

    @property
    def text(self) -> str:
        """Text that is certain now."""

    @property
    def finish(self) -> Finish | None:
        """Set once the sequence has ended."""


class OutputProcessor(Protocol):
    """Turns the tokens of one sequence into text and decides when to stop."""

    def process(self, token_id: int) -> Output:
        """Take the next token."""

    def replay(self, token_ids: list[int]) -> Output:
        """Take the tokens an earlier attempt published; ``text`` is what is still to be told."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one sequence: its new tokens, their text, and its end if it ended.

    ``logprobs`` has one entry per new token if the job asked for them; that of a beam, which gets
    no token yet, is what the step found of its next one.
    """

    seq: Sequence
    new_ids: tuple[int, ...]
    text: str
    finish: Finish | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    outcome: None = None


@dataclass(slots=True)
class EngineFigures:
    """Counts since the start.

    ``num_prompt_tokens`` went through the model, after a preemption a second time;
    ``num_cached_tokens`` did not have to, of the ``num_queried_tokens`` that were looked up.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    last_step: StepFeatures | None = None
    total_step_seconds: float = 0.0

    @property
    def last_step_seconds(self) -> float:
        """Duration of the last step, 0 before the first."""
        return self.last_step.seconds if self.last_step else 0.0


class Engine:
    """Runs sequences through a model until they end, and learns what its steps cost.

    ``on_step`` is told of each step that ran.  Not thread-safe: one thread adds, aborts and steps.
    """

    def __init__(
        self,
        runner: Runner[Logits],
        sampler: Sampler[Logits],
        step_scheduler: StepScheduler,
        make_processor: Callable[[Sequence], OutputProcessor],
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepFeatures], None] = lambda step: None,
    ) -> None:
        self.step_scheduler = step_scheduler
        self.figures = EngineFigures()
        self.learner = CostLearner()
        self._on_step = on_step
        self._runner: Runner[Any] = runner
        self._sampler: Sampler[Any] = sampler
        self._make_processor = make_processor
        self._clock = clock
        self._processors: dict[str, OutputProcessor] = {}
        self._resumed: dict[str, StepOutput] = {}
        # Ends that are told once the logprobs of the prompt are known.
        self._held: dict[str, StepOutput] = {}
        self._followers = FollowerDesk()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to tell."""
        return self.step_scheduler.has_work or bool(self._resumed)

    def add(self, seq: Sequence) -> None:
        """Take in a sequence; raises ``InvalidRequest`` if it can never run.

        The output of an earlier attempt is replayed first.  If that was complete, the next step
        reports the end without computing anything, unless the prompt's logprobs are wanted.
        """
        for each in seq.followers:
            self._processors[each.seq_id] = self._make_processor(each)
        processor = self._make_processor(seq)
        output = processor.replay(seq.output_ids) if seq.output_ids else None
        if output is None or output.finish is None:
            self.step_scheduler.add(seq)
            self._processors[seq.seq_id] = processor
        elif seq.lacks_prompt_logprobs:
            self._held[seq.seq_id] = StepOutput(seq, (), output.text, output.finish)
            # Its output must not be computed again; the list of logprobs is the same one.
            self.step_scheduler.add(replace(seq, output_ids=[], num_resumed_tokens=0))
            return
        if output is not None and (output.finish or output.text):
            self._resumed[seq.seq_id] = StepOutput(seq, (), output.text, output.finish)

    def abort(self, seq_id: str) -> Sequence | None:
        """Drop a sequence; returns it, or None if it has ended or was never here."""
        resumed = self._resumed.pop(seq_id, None)
        self._processors.pop(seq_id, None)
        self._held.pop(seq_id, None)
        return self.step_scheduler.abort(seq_id) or (resumed.seq if resumed else None)

    def extend(self, seq: Sequence, token_id: int) -> None:
        """Let a beam go on with a token, between steps."""
        self.step_scheduler.extend(seq, token_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Take in a beam that begins with the computed tokens of another one, between steps."""
        self.step_scheduler.fork(parent, child)

    def replay(self, seq: Sequence) -> Output:
        """Return the text of a sequence's output, and how it ended; computes nothing."""
        return self._make_processor(seq).replay(seq.output_ids)

    def step(self) -> list[StepOutput]:
        """Run one step and return what it did for each sequence that got a token or ended.

        If model or sampler raise, the step never happened: the sequences are as before and the
        next step tries them again.  If an output processor raises, tokens are lost on the way to
        the caller: abort every sequence and add it again with what was told of it.
        """
        outputs = list(self._resumed.values())
        started = self._clock()
        plan = self.step_scheduler.schedule()
        if plan.scheduled:
            seqs = [item.seq for item in plan.sampling]
            sampled = self._compute(plan, seqs)
            ids = [() if s.is_beam else _ids_of(t) for s, t in zip(seqs, sampled, strict=True)]
            self.step_scheduler.update(plan, ids)
            followers = self._start_followers()
            new = [self._process(*pair) for pair in zip(seqs, sampled, strict=True)]
            new += [self._process(seq, (token,)) for seq, token in followers]
            self._count(plan, sum(len(output.new_ids) for output in new))
            outputs += new
            self._time(plan, started)
        self._resumed.clear()
        return outputs

    def _compute(self, plan: StepPlan, seqs: list[Sequence]) -> list[tuple[SampledToken, ...]]:
        try:
            logits = self._runner.execute(plan)
            self._followers.sample(self._sampler, logits, plan.sampling)
            if plan.has_drafts:
                return sample_drafted(self._sampler, logits, plan.sampling)
            tokens = self._sampler.sample(logits, seqs) if seqs else []
            return [(token,) for token in tokens]
        except BaseException:
            self.step_scheduler.fail(plan)
            raise

    def _start_followers(self) -> list[tuple[Sequence, SampledToken]]:
        started = []
        for leader, seq, token in self._followers.take():
            seq.output_ids.append(token.id)
            # Before any of them ends and gives its blocks back.
            self.step_scheduler.fork(leader, seq)
            started.append((seq, token))
        return started

    def _process(self, seq: Sequence, tokens: tuple[SampledToken, ...]) -> StepOutput:
        if (held := self._held.pop(seq.seq_id, None)) is not None:
            self.step_scheduler.finish(seq)
            return held
        if seq.is_beam:
            return StepOutput(seq, (), "", None, _logprobs_of(tokens))
        text, finish, taken = "", None, 0
        for token in tokens:
            output = self._processors[seq.seq_id].process(token.id)
            text, finish, taken = text + output.text, output.finish, taken + 1
            if finish is not None:
                break
            if seq.guide is not None:
                seq.guide.accept(token.id)
        if finish is not None:
            # What comes behind the end was never said.
            del seq.output_ids[len(seq.output_ids) - len(tokens) + taken :]
            del self._processors[seq.seq_id]
            self.step_scheduler.finish(seq)
        return StepOutput(seq, _ids_of(tokens[:taken]), text, finish, _logprobs_of(tokens[:taken]))

    def _count(self, plan: StepPlan, num_sampled: int) -> None:
        self.figures.num_steps += 1
        self.figures.num_generated_tokens += num_sampled
        self.figures.num_prompt_tokens += sum(item.num_prompt_tokens for item in plan.scheduled)

    def _time(self, plan: StepPlan, started: float) -> None:
        figures, scheduler = self.figures, self.step_scheduler
        figures.num_queried_tokens = scheduler.num_queried_tokens
        figures.num_cached_tokens = scheduler.num_hit_tokens
        figures.num_preemptions = scheduler.num_preemptions
        figures.speculation = scheduler.speculation.copy()
        step = features_of(plan, self._clock() - started)
        figures.last_step = step
        figures.total_step_seconds += step.seconds
        self.learner.observe(step)
        scheduler.step_cost = self.learner.cost
        self._on_step(step)


def _ids_of(tokens: tuple[SampledToken, ...]) -> tuple[int, ...]:
    return tuple(token.id for token in tokens)


def _logprobs_of(tokens: tuple[SampledToken, ...]) -> tuple[TokenLogprobs, ...] | None:
    told = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return told if len(told) == len(tokens) and tokens else None
