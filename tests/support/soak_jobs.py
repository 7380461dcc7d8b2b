"""Jobs of a soak, of one output, several, or beams, and what each of them must say."""

import random
from collections import defaultdict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import Any

from support.fake_engine import generate, make_seq, search_beams
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.beam_choice import BeamChoice
from tidemill_gpuworker.engine.beam_group import BeamGroup, beam_params
from tidemill_gpuworker.engine.choice_group import ChoiceGroup, params_of
from tidemill_gpuworker.engine.sequence import Sequence

#: What is asked of a model of real tensors, whose tokens nobody predicts.
_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.6, "top_k": 20, "frequency_penalty": 0.3},
]
_TEMPLATES = [0, 8, 24]
_MOST_TOKENS = 40
_MOST_BEAM_TOKENS = 12


@dataclass
class SoakJob:
    """What is in the engine, and what it must say of each choice; None if nobody knows."""

    job_id: str
    kind: str
    work: Sequence | ChoiceGroup | BeamGroup
    expected: list[list[int]] | None
    told: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def tell(self, choice: int, ids: Several[int]) -> None:
        """Take new tokens."""
        self.told[choice] += ids

    def check_told(self) -> None:
        """Assert that what was told so far is right."""
        if self.expected is None:
            return
        for choice, ids in self.told.items():
            assert ids == self.expected[choice][: len(ids)], f"{self.job_id}: wrong tokens"

    def check_ended(self) -> None:
        """Assert that all was told."""
        if self.expected is None:
            assert any(self.told.values()), f"{self.job_id} ended without a token"
            return
        told = [self.told[choice] for choice in range(len(self.expected))]
        assert told == self.expected, f"{self.job_id}: tokens are wrong or missing"


def draw_job(chance: random.Random, job_id: str, vocab_size: int | None) -> SoakJob:
    """Return a job of any kind; many share the beginning of their prompts.

    It is for the fake model of ``vocab_size`` tokens, or, if that is None, for a real one.
    """
    template = [chance.randrange(8)] * chance.choice(_TEMPLATES)
    tail = [chance.randrange(100) for _ in range(chance.randint(1, 30))]
    seq = make_seq(
        [*template, *tail],
        chance.randint(1, _MOST_TOKENS),
        seq_id=job_id,
        priority=chance.choice([-1, 0, 0, 1, 1]),
    )
    if vocab_size is None:
        seq.params = seq.params.model_copy(update=chance.choice(_PARAMS))
        seq.seed = chance.getrandbits(60)
    kind = chance.choices(["single", "several", "beams"], [80, 14, 6])[0]
    if kind == "several":
        return _several(seq, chance.randint(2, 4), vocab_size)
    if kind == "beams":
        return _beams(seq, chance.randint(1, 3), vocab_size)
    return SoakJob(job_id, kind, seq, _outputs(seq, 1, vocab_size))


def _several(seq: Sequence, num: int, vocab_size: int | None) -> SoakJob:
    params = seq.params.model_copy(update={"n": num})
    sequences = [
        replace(
            seq,
            seq_id=f"{seq.seq_id}#{choice}",
            choice=choice,
            params=params_of(params, choice),
            output_ids=[],
            block_table=[],
            block_hashes=[],
            prompt_logprobs=[],
            followers=[],
        )
        for choice in range(num)
    ]
    group = ChoiceGroup(sequences, params)
    return SoakJob(seq.seq_id, "several", group, _outputs(seq, num, vocab_size))


def _outputs(seq: Sequence, num: int, vocab_size: int | None) -> list[list[int]] | None:
    if vocab_size is None:
        return None
    return [
        generate(seq.prompt_ids, _length(seq), vocab_size=vocab_size, choice=choice)
        for choice in range(num)
    ]


def _beams(seq: Sequence, width: int, vocab_size: int | None) -> SoakJob:
    length = min(_length(seq), _MOST_BEAM_TOKENS)
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=length, ignore_eos=True)
    root = replace(seq, seq_id=f"{seq.seq_id}#0", params=beam_params(params), is_beam=True)
    choice = BeamChoice(width, prompt_len=len(seq.prompt_ids), max_tokens=length)
    expected = None
    if vocab_size is not None:
        expected = search_beams(seq.prompt_ids, width, length, vocab_size)
    return SoakJob(seq.seq_id, "beams", BeamGroup(root, params, choice), expected)


def _length(seq: Sequence) -> int:
    assert seq.params.max_tokens is not None
    return seq.params.max_tokens
