"""What a job leaves behind, and the errors that tell of a job that did not end well."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel

from tidemill.protocol.errors import (
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFound,
    ResultExpired,
)
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import (
    ChoiceEnd,
    ChoiceOutput,
    JobEnd,
    JobResult,
    TokenChunk,
    Usage,
)
from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.states import JobState

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a job's outputs, the ``index``-th; ``score`` is what it was chosen by, if it was.

    The reasons are None for an output of a job that did not end well.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The whole output of a job that ended; partial if ``state`` is not ``done``.

    ``finish_reason`` and ``stop_reason`` have the values OpenAI's and vLLM's clients know.
    ``outcome`` is what a job of another kind than *generate* was for.  ``logprobs`` has one entry
    per token of a job that asked for them; ``prompt_logprobs`` one per token of the prompt,
    ``prompt_ids``, and None for the first, which follows nothing.  Of a job that asked for several
    outputs these are the first one's, and ``choices`` has them all.
    """

    job_id: str
    state: JobState
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    usage: Usage
    error: str | None = None
    outcome: Outcome | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    several: tuple[Choice, ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All outputs, by index; a single one if no more were asked for."""
        reasons = (self.finish_reason, self.stop_reason)
        return self.several or (Choice(0, self.text, self.token_ids, *reasons, self.logprobs),)

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message, to go on with: ``[*messages, result.message, ...]``."""
        return {"role": "assistant", "content": self.text}

    def parsed(self, model: type[Model]) -> Model:
        """Return the text as this pydantic model, of a job that was asked for its schema.

        Raises ``pydantic.ValidationError`` if it is not, as when ``max_tokens`` cut it off.
        """
        return model.model_validate_json(self.text)


def from_stored(job_id: str, stored: JobResult) -> Result:
    """Return the result that a worker stored when it finished the job."""
    outputs = [ChoiceOutput(ids=stored.ids, text=stored.text, logprobs=stored.logprobs)]
    outputs += stored.others
    return replace(
        _result(job_id, stored.end, stored.ids, stored.text),
        several=_choices(outputs, stored.end.choices) if stored.end.choices else (),
        outcome=stored.outcome,
        logprobs=stored.logprobs,
        prompt_ids=stored.prompt_ids,
        prompt_logprobs=stored.prompt_logprobs,
    )


def from_log(job_id: str, end: JobEnd, chunks: Sequence[TokenChunk]) -> Result:
    """Return the result of a job that ended without its worker, put together from its log."""
    outputs = [
        _joined([chunk for chunk in chunks if chunk.choice == choice])
        for choice in range(1 + max((chunk.choice for chunk in chunks), default=0))
    ]
    first = outputs[0]
    return replace(
        _result(job_id, end, first.ids, first.text, sum(len(output.ids) for output in outputs)),
        logprobs=first.logprobs,
        several=_choices(outputs, end.choices) if len(outputs) > 1 else (),
    )


def failure_of(job_id: str, end: JobEnd, result: Result | None = None) -> JobError | None:
    """Return the error that stands for a job's end, or None if the job is done.

    ``result`` is the partial output that the error carries along.
    """
    state = JobState(end.state)
    if state is JobState.DONE:
        return None
    if state is JobState.CANCELLED:
        return JobCancelled(f"{job_id} was cancelled", job_id=job_id, result=result)
    reason = end.error or "no reason was given"
    return JobFailed(
        f"{job_id} is {state}: {reason}",
        job_id=job_id,
        state=state,
        finish_reason=end.finish_reason or "",
        result=result,
    )


def outcome_of(result: Result) -> Result | JobError:
    """Return ``result`` itself if the job is done, else the error that carries it."""
    end = JobEnd(state=result.state, finish_reason=result.finish_reason, error=result.error)
    return failure_of(result.job_id, end, result) or result


def not_found(job_id: str) -> JobNotFound:
    """Return the error for a job of which nothing is known."""
    return JobNotFound(
        f"there is no job {job_id}",
        job_id=job_id,
        fix="Check the id and the broker; results are kept for 24 hours after the job's end.",
    )


def result_expired(job_id: str) -> ResultExpired:
    """Return the error for a job that has ended, and of whose output nothing is left."""
    return ResultExpired(
        f"{job_id} has ended, and its result is not kept any more",
        job_id=job_id,
        fix="Read results within 24 hours, or raise the bound on kept results.",
    )


def _joined(chunks: Sequence[TokenChunk]) -> ChoiceOutput:
    logprobs = tuple(told for chunk in chunks for told in chunk.logprobs or ())
    return ChoiceOutput(
        ids=tuple(token_id for chunk in chunks for token_id in chunk.ids),
        text="".join(chunk.text for chunk in chunks),
        logprobs=logprobs or None,
    )


def _choices(outputs: Sequence[ChoiceOutput], ends: Sequence[ChoiceEnd]) -> tuple[Choice, ...]:
    known = [*ends, *(ChoiceEnd() for _ in outputs)]
    return tuple(
        Choice(
            index=index,
            text=output.text,
            token_ids=output.ids,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            logprobs=output.logprobs,
            score=end.score,
        )
        for index, (output, end) in enumerate(zip(outputs, known, strict=False))
    )


def _result(
    job_id: str, end: JobEnd, ids: tuple[int, ...], text: str, num_tokens: int | None = None
) -> Result:
    usage = end.usage
    if usage == Usage():
        # Whoever ended the job for its worker did not know the worker's counts.
        usage = Usage(completion_tokens=len(ids) if num_tokens is None else num_tokens)
    return Result(
        job_id=job_id,
        state=JobState(end.state),
        text=text,
        token_ids=ids,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        usage=usage,
        error=end.error,
    )
