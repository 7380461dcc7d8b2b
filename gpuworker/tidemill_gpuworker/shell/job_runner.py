"""Runs claimed jobs on the engine and hands what comes out to the publisher."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tidemill.protocol.errors import (
    CannotGoOn,
    EngineFailed,
    GrammarTooComplex,
    TidemillError,
)
from tidemill.protocol.messages import FinishedSequence, JobEnd, Usage
from tidemill.protocol.states import FinishReason, JobState
from tidemill.protocol.structured import StructuredOutput
from tidemill_gpuworker.engine.beam_group import BeamGroup
from tidemill_gpuworker.engine.choice_group import ChoiceGroup
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.group_output import GroupOutput
from tidemill_gpuworker.engine.job_engine import JobEngine, Work, WorkOutput
from tidemill_gpuworker.engine.kind_work import KindJob, KindWork
from tidemill_gpuworker.engine.scored_prompt import ScoredPrompt
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.claims import Claim, KindClaim, Refusal
from tidemill_gpuworker.shell.engine_probe import probe, smallest_sequence
from tidemill_gpuworker.shell.failures import Failure, failure_of
from tidemill_gpuworker.shell.isolation import Isolation
from tidemill_gpuworker.shell.job_work import sequences_of, work_of
from tidemill_gpuworker.shell.jobs import Job
from tidemill_gpuworker.shell.outbox import Update
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.structured_output.compiler import Compilation
from tidemill_gpuworker.structured_output.desk import GrammarDesk

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    claim: Claim | KindClaim
    claimed_at: float
    has_token: bool = False
    grammar: Compilation | None = None


class JobRunner:
    """The jobs in the engine, from claim to end; used by the step loop's thread alone.

    The publisher's record is the truth about what a job has generated: whenever the engine's is
    in doubt, the sequence is built again from it.  ``give_back`` takes a job that failed in a way
    that may pass, and the reason, once all that it has generated is written.  ``grammars`` keeps
    jobs until their grammars are compiled, while the others run.
    """

    def __init__(
        self,
        engine: JobEngine,
        publisher: Publisher,
        give_back: Callable[[Job, str], None],
        *,
        grammars: GrammarDesk | None = None,
        kinds: KindWork | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = GroupEngine(engine)
        self._grammars = GrammarDesk(None) if grammars is None else grammars
        self._kinds = kinds
        self._publisher = publisher
        self._give_back = give_back
        self._clock = clock
        #: Set once the engine computes nothing any more, with or without a job.
        self.fault: EngineFailed | None = None
        self._isolation = Isolation()
        self._running: dict[str, _Running] = {}
        self._in_engine: dict[str, None] = {}
        self._departed: list[FinishedSequence] = []

    @property
    def has_work(self) -> bool:
        """Whether a job has not ended yet."""
        return bool(self._running)

    @property
    def can_step(self) -> bool:
        """Whether ``step`` has something to do: jobs may only wait for their grammars."""
        return len(self._running) > len(self._grammars) or self._grammars.has_settled

    @property
    def num_held(self) -> int:
        """Sequences kept out of the engine's queue.

        For their grammars, for the prompt that they share with another one, or while a faulty job
        is looked for.
        """
        num_jobs = self._isolation.num_held + len(self._grammars)
        return num_jobs + self._engine.num_followers

    @property
    def jobs(self) -> list[Job]:
        """The jobs that have not ended yet."""
        return [running.claim.job for running in self._running.values()]

    def take_departed(self) -> tuple[FinishedSequence, ...]:
        """Return the jobs that ended or left since the last call, and what they had cost here."""
        departed, self._departed = self._departed, []
        return tuple(departed)

    def admit(self, claim: Claim | KindClaim) -> None:
        """Run a job; an older attempt of the same job is dropped."""
        self._remove(claim.job.job_id)
        self._publisher.open(claim.job, claim.written)
        self._running[claim.job.job_id] = _Running(claim, self._clock())
        metrics.CLAIMED_JOBS.inc()
        if claim.written:
            metrics.RESUMED_JOBS.inc()
        structured = None if isinstance(claim, KindClaim) else claim.request.structured
        if structured is None or self._has_grammar(claim, structured):
            self._let_in(claim.job.job_id)

    def refuse(self, refusal: Refusal) -> None:
        """End a job that cannot run, or give it back if it may run later."""
        self._remove(refusal.job.job_id)
        self._publisher.open(refusal.job, refusal.written)
        self._fail(refusal.job, refusal.failure)

    def abandon(self, job: Job) -> None:
        """Stop computing an attempt; what it has generated stays with the publisher."""
        running = self._running.get(job.job_id)
        if running is not None and running.claim.job == job:
            self._depart(job.job_id, self._remove(job.job_id))

    def step(self) -> None:
        """Run one engine step; an exception costs a repetition, at worst the faulty job."""
        for job_id in self._grammars.take_settled():
            self._let_in(job_id)
        while trial := self._isolation.next_trial(len(self._in_engine)):
            self._enter(trial)
        try:
            outputs = self._engine.step()
        except CannotGoOn as error:
            self._end_stuck(error)
            return
        except EngineFailed as error:
            _log.error("%s", error)
            self.fault = error
            return
        except Exception as error:
            # The outermost frame of a step: whatever the engine broke on, the worker goes on.
            _log.exception("a step with %d jobs failed", len(self._in_engine))
            metrics.STEP_FAILURES.inc()
            self._recover(error)
            return
        progressed = {output.seq.seq_id for output in outputs}
        kept = {each.seq.seq_id for each in outputs if each.new_ids or each.finish is not None}
        self._isolation.step_worked(progressed, kept)
        self._publisher.publish([self._update(output) for output in outputs])

    def _update(self, output: WorkOutput) -> Update:
        job_id = output.seq.seq_id
        self._note_first_token(job_id, output)
        end, prompt = None, None
        if output.finish is not None:
            end = JobEnd(
                state=JobState.DONE,
                finish_reason=str(output.finish.reason),
                stop_reason=output.finish.stop_reason,
                usage=_usage(output.seq),
                choices=output.ends if isinstance(output, GroupOutput) else (),
            )
            prompt = _scored_prompt(output.seq)
            metrics.ENDED_JOBS.labels(end.state).inc()
            self._running.pop(job_id, None)
            self._in_engine.pop(job_id, None)
            self._isolation.discard(job_id)
            self._grammars.discard(job_id)
            self._depart(job_id, output.seq)
        return Update(
            job_id,
            output.new_ids,
            output.text,
            end,
            output.logprobs,
            prompt,
            output.outcome,
            output.choice if isinstance(output, GroupOutput) else 0,
        )

    def _note_first_token(self, job_id: str, output: WorkOutput) -> None:
        running = self._running.get(job_id)
        if running is not None and output.new_ids and not running.has_token:
            running.has_token = True
            metrics.FIRST_TOKEN_SECONDS.observe(self._clock() - running.claimed_at)

    def _has_grammar(self, claim: Claim | KindClaim, structured: StructuredOutput) -> bool:
        try:
            grammar = self._grammars.compile(claim.job.job_id, structured)
        except TidemillError as error:
            self._remove(claim.job.job_id)
            self._fail(claim.job, failure_of(error, "the grammar cannot be compiled"))
            return False
        self._running[claim.job.job_id].grammar = grammar
        return grammar.is_settled

    def _let_in(self, job_id: str) -> None:
        if self._isolation.is_active:
            self._isolation.hold(job_id)
        else:
            self._enter(job_id)

    def _enter(self, job_id: str) -> None:
        claim = self._running[job_id].claim
        generated = self._generated(claim)
        if generated is None:
            # Lost a moment ago; the message about it is on its way.
            self._depart(job_id, self._remove(job_id))
            return
        try:
            self._engine.add(self._work(claim, *generated))
            self._in_engine[job_id] = None
        except GrammarTooComplex as error:
            self._end_stuck(error.of((job_id,)))
        except Exception as error:
            # The outermost frame of one job, as in ``step``: its output cannot be replayed.
            if not isinstance(error, TidemillError):
                _log.exception("%s: cannot be added to the engine", job_id)
            self._remove(job_id)
            self._fail(claim.job, failure_of(error, "the job cannot be started"))

    def _generated(self, claim: Claim | KindClaim) -> list[Generated] | None:
        num = 1 if isinstance(claim, KindClaim) else claim.request.params.n
        found = [self._publisher.generated(claim.job, choice) for choice in range(num)]
        generated = [each for each in found if each is not None]
        return generated if len(generated) == num else None

    def _work(self, claim: Claim | KindClaim, *generated: Generated) -> Work:
        if isinstance(claim, KindClaim):
            assert self._kinds is not None, "such claims come from the kinds"
            given = KindJob(claim.job.job_id, claim.request, claim.inputs)
            return self._kinds.start(given, generated[0])
        work = work_of(claim, generated)
        if grammar := self._running[claim.job.job_id].grammar:
            for seq in sequences_of(work):
                seq.guide = grammar.guide(seq.output_ids)
        return work

    def _remove(self, job_id: str) -> Work | None:
        self._running.pop(job_id, None)
        self._isolation.discard(job_id)
        self._grammars.discard(job_id)
        return self._leave(job_id)

    def _leave(self, job_id: str) -> Work | None:
        if job_id not in self._in_engine:
            return None
        del self._in_engine[job_id]
        return self._engine.abort(job_id)

    def _depart(self, job_id: str, seq: Work | None) -> None:
        self._departed.append(
            FinishedSequence(
                job_id=job_id,
                prompt_tokens=seq.num_prompt_tokens if seq else 0,
                cached_tokens=(seq.num_cached_tokens or 0) if seq else 0,
                output_tokens=len(seq.output_ids) - seq.num_resumed_tokens if seq else 0,
            )
        )

    def _end_stuck(self, error: CannotGoOn) -> None:
        # The step never happened, and nobody else has a part in its failure.
        for job_id in error.seq_ids:
            if isinstance(error, GrammarTooComplex) and self._begin_alone(job_id):
                continue
            job = self._running[job_id].claim.job
            self._remove(job_id)
            self._fail(job, failure_of(error, "the answer cannot go on"))

    def _begin_alone(self, job_id: str) -> bool:
        # Jobs of the same grammar add to what it holds; alone it shows who is too complex.
        running = self._running[job_id]
        assert running.grammar is not None, "it became too complex"
        grammar = self._grammars.compile_alone(job_id, running.grammar)
        if grammar is None:
            return False
        running.grammar = grammar
        self._isolation.discard(job_id)
        self._leave(job_id)
        if grammar.is_settled:
            self._let_in(job_id)
        return True

    def _recover(self, error: Exception) -> None:
        in_engine = list(self._in_engine)
        verdict = self._isolation.step_failed(in_engine)
        for job_id in in_engine:
            self._leave(job_id)
        if verdict.culprit is not None:
            self._convict(verdict.culprit, error)
        for job_id in in_engine:
            if job_id not in verdict.removed:
                self._enter(job_id)

    def _convict(self, job_id: str, error: Exception) -> None:
        smallest = self._kinds.smallest if self._kinds else smallest_sequence
        # A broken engine proves nothing against the job: it goes back as it came, with the others.
        if (fault := probe(self._engine.inner, smallest)) is not None:
            self.fault = EngineFailed(
                f"the engine fails on everything, last with {type(fault).__name__}: {fault}",
                fix="Start the worker again; look at its device if that does not help.",
            )
            return
        job = self._running[job_id].claim.job
        self._remove(job_id)
        self._fail(job, failure_of(error, "the engine fails on this job, also when it runs alone"))

    def _fail(self, job: Job, failure: Failure) -> None:
        self._depart(job.job_id, None)
        if failure.may_pass:
            _log.warning("%s: given back: %s", job.job_id, failure.reason)
            self._publisher.close(job, partial(self._give_back, job, failure.reason))
        else:
            self._end_failed(job, failure.reason)

    def _end_failed(self, job: Job, reason: str) -> None:
        _log.warning("%s: failed: %s", job.job_id, reason)
        end = JobEnd(
            state=JobState.FAILED,
            finish_reason=FinishReason.ERROR,
            error=reason,
            usage=Usage(completion_tokens=self._publisher.num_tokens(job)),
        )
        metrics.ENDED_JOBS.labels(end.state).inc()
        self._publisher.publish([Update(job.job_id, end=end)])


def _scored_prompt(seq: Work) -> ScoredPrompt | None:
    if isinstance(seq, ChoiceGroup | BeamGroup):
        seq = seq.lead
    if not isinstance(seq, Sequence):
        return None
    if seq.params.prompt_logprobs is None or seq.lacks_prompt_logprobs:
        return None
    return ScoredPrompt(tuple(seq.prompt_ids), tuple(seq.prompt_logprobs))


def _usage(seq: Work) -> Usage:
    return Usage(
        prompt_tokens=seq.num_prompt_tokens,
        completion_tokens=len(seq.output_ids),
        cached_tokens=seq.num_cached_tokens or 0,
    )
