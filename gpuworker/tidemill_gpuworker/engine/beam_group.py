"""A job whose outputs are found by beam search: its beams as sequences of the engine."""

from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import chain
from typing import Protocol

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.beam_choice import Beam, BeamChoice, Heir
from tidemill_gpuworker.engine.choice_group import untold
from tidemill_gpuworker.engine.engine import Output
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.group_output import GroupOutput, SequenceOutput, end_of
from tidemill_gpuworker.engine.sequence import Sequence, SequenceStatus


class BeamEngine(Protocol):
    """What beams need of an engine between steps."""

    def extend(self, seq: Sequence, token_id: int) -> None:
        """Let a beam go on with a token."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Take in a beam that begins with the computed tokens of another one."""

    def abort(self, seq_id: str) -> object:
        """Drop a beam."""

    def replay(self, seq: Sequence) -> Output:
        """Return the text of an output, and how it ended."""
        ...


class BeamGroup:
    """The beams of one job, which go from token to token together.

    ``root`` is the prompt as a sequence, ``params`` the job's.  A beam with several heirs becomes
    the first of them, and is forked for the others, so that all share the blocks of what they have
    in common.  Nothing is told before the search is over; ``told`` is what of it the token log
    holds already.
    """

    def __init__(
        self,
        root: Sequence,
        params: SamplingParams,
        choice: BeamChoice,
        told: Several[Generated] = (),
    ) -> None:
        self.lead = root
        self.sequences: tuple[Sequence, ...] = (root,)
        self._params = params
        self._choice = choice
        self._told = told
        self._rows: dict[str, TokenLogprobs] = {}
        self._num_forks = 0
        self._outputs: list[Beam] = []

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
        return self.lead.num_cached_tokens

    @property
    def output_ids(self) -> list[int]:
        """The tokens of the outputs; before the end those of the beams."""
        return list(chain.from_iterable(b.ids for b in self._outputs or self._choice.beams))

    @property
    def num_resumed_tokens(self) -> int:
        """A search always begins anew."""
        return 0

    def starters(self) -> list[Sequence]:
        """Return what enters the engine."""
        return [self.lead]

    def take(self, output: SequenceOutput, engine: BeamEngine) -> list[GroupOutput]:
        """Take the row of one beam; once all are here the search goes on, or ends and is told."""
        assert output.logprobs is not None, "a beam's row comes as logprobs"
        self._rows[output.seq.seq_id] = output.logprobs[0]
        if len(self._rows) < len(self.sequences):
            return [GroupOutput(self)]
        heirs = self._choice.advance([self._rows[seq.seq_id].top for seq in self.sequences])
        self._rows.clear()
        self._replace(heirs, engine)
        return self._tell(engine) if self._choice.is_over else [GroupOutput(self)]

    def _replace(self, heirs: Several[Heir], engine: BeamEngine) -> None:
        followed = {heir.parent for heir in heirs}
        for number, seq in enumerate(self.sequences):
            if number not in followed:
                engine.abort(seq.seq_id)
        first = {heir.parent: index for index, heir in reversed(list(enumerate(heirs)))}
        # Forks first: a parent that goes on by itself has another token more.
        following = {
            index: self._fork(self.sequences[heir.parent], heir, engine)
            for index, heir in enumerate(heirs)
            if first[heir.parent] != index
        }
        for parent, index in first.items():
            following[index] = self.sequences[parent]
            engine.extend(following[index], heirs[index].beam.ids[-1])
        self.sequences = tuple(following[index] for index in range(len(heirs)))

    def _fork(self, parent: Sequence, heir: Heir, engine: BeamEngine) -> Sequence:
        self._num_forks += 1
        child = replace(
            parent,
            seq_id=f"{self.seq_id}#{self._num_forks}",
            output_ids=list(heir.beam.ids),
            block_table=[],
            block_hashes=list(parent.block_hashes),
            num_computed_tokens=0,
            num_null_blocks=0,
            num_preemptions=0,
            num_prefix_blocks=0,
            sampling_state=None,
            status=SequenceStatus.WAITING,
            is_held=False,
            followers=[],
        )
        engine.fork(parent, child)
        return child

    def _tell(self, engine: BeamEngine) -> list[GroupOutput]:
        self._outputs = self._choice.best(self._params.n)
        told, ends = [], []
        for number, beam in enumerate(self._outputs):
            output = engine.replay(replace(self.lead, output_ids=list(beam.ids)))
            assert output.finish is not None, "a beam is told once it is complete"
            ends.append(end_of(output.finish, self._choice.score(beam)))
            told.append(untold(GroupOutput(self, number, beam.ids, output.text), self._told))
            if number == 0:
                finish = output.finish
        return [*told[:-1], replace(told[-1], finish=finish, ends=tuple(ends))]


def beam_params(params: SamplingParams) -> SamplingParams:
    """Return how the engine computes one beam: it is told the likeliest tokens, and none drawn."""
    changes = {
        "n": 1,
        "best_of": None,
        "use_beam_search": False,
        "temperature": 0.0,
        "logprobs": 2 * params.num_outputs,
    }
    return params.model_copy(update=changes)
