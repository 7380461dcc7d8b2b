"""A job of several sampled outputs: its sequences, and which of them are told."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import chain

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.group_output import GroupOutput, SequenceOutput, end_of
from tidemill_gpuworker.engine.job_engine import Finish
from tidemill_gpuworker.engine.sequence import Sequence


@dataclass(slots=True)
class _Kept:
    """What one sequence has said so far, where that is told at the end only."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Mean logprob of a token."""
        return sum(told.logprob for told in self.logprobs) / max(1, len(self.logprobs))


class ChoiceGroup:
    """The sequences of a job that asked for several outputs, one per choice.

    They share the prompt: whoever has no token yet follows the first such one, which computes it,
    and parts from it at the first token.  ``params`` are the job's.  With ``best_of`` nothing is
    told before all have ended; then the ``n`` with the highest mean logprob are, the best as choice
    0.  ``told`` is what of those the token log holds already.
    """

    def __init__(
        self, sequences: Several[Sequence], params: SamplingParams, told: Several[Generated] = ()
    ) -> None:
        self.lead = sequences[0]
        self.sequences = tuple(sequences)
        self._params = params
        self._told = told
        self._kept = [_Kept() for _ in sequences]
        self._finishes: dict[int, Finish] = {}

    @property
    def seq_id(self) -> str:
        """The job's id."""
        return self.lead.seq_id.partition("#")[0]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.lead.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        """How much of it was cached."""
        known = [s.num_cached_tokens for s in self.sequences if s.num_cached_tokens is not None]
        return min(known, default=None)

    @property
    def output_ids(self) -> list[int]:
        """The tokens of all of them."""
        return list(chain.from_iterable(seq.output_ids for seq in self.sequences))

    @property
    def num_resumed_tokens(self) -> int:
        """How many of those earlier attempts generated."""
        return sum(seq.num_resumed_tokens for seq in self.sequences)

    def starters(self) -> list[Sequence]:
        """Return what enters the engine, the others being followers of the last of them."""
        begun = [seq for seq in self.sequences if seq.output_ids]
        fresh = [seq for seq in self.sequences if not seq.output_ids]
        if fresh:
            fresh[0].followers = fresh[1:]
        return begun + fresh[:1]

    def take(self, output: SequenceOutput, engine: object = None) -> list[GroupOutput]:
        """Take what a step did for one of the sequences; return what of it is to be told."""
        choice = output.seq.choice
        if output.finish is not None:
            self._finishes[choice] = output.finish
        is_over = len(self._finishes) == len(self.sequences)
        if self._params.is_told_at_end:
            self._keep(self._kept[choice], output)
            return self._best() if is_over else [GroupOutput(self)]
        told = GroupOutput(self, choice, output.new_ids, output.text, logprobs=output.logprobs)
        return [self._last(told, range(len(self.sequences))) if is_over else told]

    def _keep(self, kept: _Kept, output: SequenceOutput) -> None:
        kept.ids += output.new_ids
        kept.text += output.text
        kept.logprobs += output.logprobs or ()

    def _best(self) -> list[GroupOutput]:
        ranking = sorted(range(len(self._kept)), key=lambda choice: -self._kept[choice].score)
        best = ranking[: self._params.n]
        told = [self._tell(number, self._kept[choice]) for number, choice in enumerate(best)]
        return [*told[:-1], self._last(told[-1], best)]

    def _tell(self, number: int, kept: _Kept) -> GroupOutput:
        wants_logprobs = self._params.logprobs is not None
        return untold(
            GroupOutput(
                self,
                number,
                tuple(kept.ids),
                kept.text,
                logprobs=tuple(kept.logprobs) if wants_logprobs else None,
            ),
            self._told,
        )

    def _last(self, output: GroupOutput, choices: Several[int]) -> GroupOutput:
        is_chosen = self._params.is_told_at_end
        ends = tuple(
            end_of(self._finishes[choice], self._kept[choice].score if is_chosen else None)
            for choice in choices
        )
        return replace(output, finish=self._finishes[choices[0]], ends=ends)


def untold(output: GroupOutput, told: Several[Generated]) -> GroupOutput:
    """Return what the log does not hold yet of a choice that is told as a whole.

    Raises ``ArithmeticError`` if the log holds another beginning: then the same computation has
    given different tokens.
    """
    before = told[output.choice] if output.choice < len(told) else Generated([], 0)
    num = len(before.ids)
    if list(output.new_ids[:num]) != before.ids:
        raise ArithmeticError(
            f"{output.seq.seq_id}: an earlier attempt told other tokens of choice {output.choice};"
            " the engine does not repeat what it computed"
        )
    return replace(
        output,
        new_ids=output.new_ids[num:],
        text=output.text[before.num_chars :],
        logprobs=output.logprobs[num:] if output.logprobs else None,
    )


def params_of(params: SamplingParams, choice: int) -> SamplingParams:
    """Return how one choice of a job is sampled: the first one alone scores the prompt."""
    changes: dict[str, object] = {}
    if choice and params.prompt_logprobs is not None:
        changes["prompt_logprobs"] = None
    if params.is_told_at_end and params.logprobs is None:
        changes["logprobs"] = 0
    return params.model_copy(update=changes) if changes else params
