"""Penalties, biases and forbidden tokens against transformers and float64, row by row."""

from collections.abc import Collection
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.protocol.errors import NoTokenLeft
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.logit_edits import unpack_mask
from tidemill_gpuworker.sampling.sampler import LogprobsMode, Sampler
from tidemill_gpuworker.sampling.token_counts import TokenCounts

VOCAB = 100
EOS = 5


def make_seq(
    *,
    prompt: Several[int] = (1, 2, 3),
    output: Several[int] = (),
    seed: int = 0,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Sequence:
    return Sequence(
        seq_id="s",
        prompt_ids=list(prompt),
        params=SamplingParams(**{"temperature": 0.0} | params),
        seed=seed,
        output_ids=list(output),
        bad_word_ids=bad_word_ids,
    )


def random_logits(rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edited(logits: torch.Tensor, seqs: Collection[Sequence]) -> npt.NDArray[np.float64]:
    """The logits that sampled rows are drawn from; without filters, those that were edited."""
    seen: list[torch.Tensor] = []

    def spy(
        logits: torch.Tensor, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(dim=1)

    for seq in seqs:
        seq.params = seq.params.model_copy(update={"temperature": 1.0})
    Sampler([EOS], gumbel_argmax=spy).sample(logits, list(seqs))
    result: npt.NDArray[np.float64] = seen[0].double().numpy()
    return result


def by_transformers(
    processor: transformers.LogitsProcessor, ids: Several[int], logits: torch.Tensor
) -> npt.NDArray[np.float64]:
    scores = processor(torch.tensor([list(ids)]), logits[None].double())
    result: npt.NDArray[np.float64] = scores[0].numpy()
    return result


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(3)
    texts = [((7, 8, 9), (8, 8, 20)), ((1,), ()), ((4, 4), tuple(range(90)))]
    penalties = [1.3, 0.7, 5.0]
    seqs = [
        make_seq(prompt=prompt, output=output, repetition_penalty=penalty)
        for (prompt, output), penalty in zip(texts, penalties, strict=True)
    ]
    ours = edited(logits, seqs)
    for row, ((prompt, output), penalty) in enumerate(zip(texts, penalties, strict=True)):
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        wanted = by_transformers(processor, prompt + output, logits[row])
        np.testing.assert_allclose(ours[row], wanted, rtol=1e-6)


@settings(max_examples=60)
@given(
    output=st.lists(st.integers(0, VOCAB - 1), max_size=150),
    presence=st.sampled_from([0.0, -2.0, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, -0.3, 1.7]),
    repetition=st.sampled_from([1.0, 0.5, 1.9]),
)
def test_penalties_are_those_of_a_float64_reference(
    output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    prompt = [3, 50, 3]
    logits = random_logits(1, seed=len(output))
    seq = make_seq(
        prompt=prompt,
        output=output,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    counts = np.bincount(np.array(output, np.int64), minlength=VOCAB)
    wanted = logits[0].double().numpy()
    for token in {*prompt, *output}:
        wanted[token] *= 1 / repetition if wanted[token] > 0 else repetition
    wanted = wanted - frequency * counts - presence * (counts > 0)
    np.testing.assert_allclose(edited(logits, [seq])[0], wanted, rtol=1e-5, atol=1e-5)


def test_penalties_kept_up_step_by_step_equal_those_of_the_whole_text() -> None:
    options: dict[str, Any] = {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    }
    logits = random_logits(1)
    grown = make_seq(**options)
    generator = np.random.default_rng(3)
    for _ in range(200):
        grown.output_ids.append(int(generator.integers(VOCAB)))
        kept_up = edited(logits, [grown])
    built_again = make_seq(output=grown.output_ids, **options)
    assert (kept_up == edited(logits, [built_again])).all()


def test_extreme_penalties_leave_numbers() -> None:
    logits = torch.tensor([[0.0, 5.0, -5.0] + [1.0] * (VOCAB - 3)])
    for penalty in (5e-324, 1e308):
        seq = make_seq(prompt=[0, 1, 2], repetition_penalty=penalty)
        assert np.isfinite(edited(logits, [seq])).all()


def test_logit_bias_is_the_sequence_bias_of_transformers() -> None:
    logits = random_logits(1)
    bias = {4: 2.5, 99: -7.0, 0: 100.0}
    processor = transformers.SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})
    wanted = by_transformers(processor, [1, 2, 3], logits[0])
    ours = edited(logits, [make_seq(logit_bias=bias)])
    np.testing.assert_allclose(ours[0], wanted, rtol=1e-6)


def test_bad_words_are_those_of_transformers_within_the_output() -> None:
    words = [[7], [8, 9], [8, 9, 10], [11, 12]]
    processor = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=EOS)
    bad_word_ids = tuple(tuple(word) for word in words)
    for output in ((1,), (8,), (8, 9), (3, 8, 9), (11, 11), (11, 12), (9, 8)):
        logits = random_logits(1)
        ours = edited(logits, [make_seq(output=output, bad_word_ids=bad_word_ids)])
        wanted = by_transformers(processor, output, logits[0])
        assert (np.isneginf(ours[0]) == np.isneginf(wanted)).all()
        kept = np.isfinite(wanted)
        assert (ours[0][kept] == wanted[kept]).all()


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    ours = edited(random_logits(1), [make_seq(prompt=[8], bad_word_ids=((8, 9),))])
    assert np.isfinite(ours).all()


def test_only_allowed_tokens_are_left() -> None:
    ours = edited(random_logits(1), [make_seq(allowed_token_ids=[9, 3, 9, 50])])
    assert np.flatnonzero(np.isfinite(ours[0])).tolist() == [3, 9, 50]


def test_a_bias_does_not_bring_back_what_is_forbidden() -> None:
    seq = make_seq(
        allowed_token_ids=[1, 2, 3, EOS],
        bad_word_ids=((2,),),
        min_tokens=1,
        logit_bias={2: 100.0, 60: 100.0, EOS: 100.0, 1: 1.0},
    )
    logits = random_logits(1)
    ours = edited(logits, [seq])
    assert np.flatnonzero(np.isfinite(ours[0])).tolist() == [1, 3]
    assert ours[0][1] == (logits[0, 1] + 1.0).item()


class FixedGuide:
    """Allows the same tokens for ever."""

    is_ready = True
    has_ended = False

    def __init__(self, allowed: Several[int]) -> None:
        self._allowed = allowed

    def fill_mask(self, row: torch.Tensor) -> None:
        words = np.zeros(len(row), np.uint32)
        for token in self._allowed:
            words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        row.copy_(torch.from_numpy(words.view(np.int32)))

    def count_allowed(self, token_ids: Several[int]) -> int:
        return next((n for n, t in enumerate(token_ids) if t not in self._allowed), len(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Nothing moves it."""

    def accept(self, token_id: int) -> None:
        assert token_id in self._allowed


def test_a_guide_leaves_what_its_mask_allows_and_others_alone() -> None:
    logits = random_logits(3)
    seqs = [make_seq(), make_seq(), make_seq()]
    seqs[1].guide = FixedGuide([0, 31, 32, 63, 99])
    ours = edited(logits, seqs)
    assert np.flatnonzero(np.isfinite(ours[1])).tolist() == [0, 31, 32, 63, 99]
    assert (ours[[0, 2]] == logits[[0, 2]].double().numpy()).all()


def test_masks_are_unpacked_bit_by_bit() -> None:
    masks = torch.tensor([[-1, 1], [-(2**31), 0]], dtype=torch.int32)
    unpacked = unpack_mask(masks, 40)
    assert unpacked[0].nonzero()[:, 0].tolist() == list(range(33))
    assert unpacked[1].nonzero()[:, 0].tolist() == [31]


def test_penalties_come_after_the_bias() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    seq = make_seq(prompt=[4], logit_bias={4: 4.0}, repetition_penalty=2.0)
    # -1 + 4 is positive when the penalty sees it, and so is divided.
    assert edited(logits, [seq])[0][4] == 1.5


def test_a_row_whose_parameters_leave_no_token_is_told_so() -> None:
    logits = random_logits(2)
    hopeless = make_seq(allowed_token_ids=[EOS], min_tokens=1)
    for temperature in (0.0, 1.0):
        hopeless.params = hopeless.params.model_copy(update={"temperature": temperature})
        with pytest.raises(NoTokenLeft, match="what s allows"):
            Sampler([EOS]).sample(logits, [make_seq(), hopeless])
    with pytest.raises(ArithmeticError):
        Sampler([EOS]).sample(logits * float("nan"), [make_seq(), hopeless])


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"repetition_penalty": 1.4, "temperature": 0.8, "top_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 3},
    {"logit_bias": {1: 5.0, 70: -5.0}, "temperature": 1.2, "logprobs": 0},
    {"allowed_token_ids": list(range(40)), "top_k": 20, "temperature": 1.0, "min_tokens": 9},
    {"bad_word_ids": ((8,), (3, 4)), "temperature": 1.5, "min_p": 0.01},
]


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_a_row_gives_the_same_token_and_logprobs_in_any_batch_and_order(mode: LogprobsMode) -> None:
    generator = np.random.default_rng(0)
    count = 4 * len(KINDS)
    logits = random_logits(count, seed=9)

    def rows() -> list[Sequence]:
        return [
            make_seq(seed=row, output=outputs[row], **KINDS[row % len(KINDS)])
            for row in range(count)
        ]

    outputs = [generator.integers(0, VOCAB, row).tolist() for row in range(count)]
    sampler = Sampler([EOS], logprobs_mode=mode)
    together = sampler.sample(logits, rows())
    alone = [sampler.sample(logits[row : row + 1], [seq])[0] for row, seq in enumerate(rows())]
    assert together == alone
    for _ in range(5):
        order = generator.permutation(count)[: int(generator.integers(2, count))]
        seqs = rows()
        shuffled = sampler.sample(logits[torch.from_numpy(order)], [seqs[row] for row in order])
        assert shuffled == [together[row] for row in order]


def test_counts_grow_past_their_first_room() -> None:
    counts = TokenCounts([5, 5, 900])
    output: list[int] = []
    for token in [*range(500), *range(250)]:
        output.append(token)
        counts.count(output)
    table = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert table == {900: 0.0} | {token: 2.0 if token < 250 else 1.0 for token in range(500)}
