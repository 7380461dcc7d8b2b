"""The sampler draws from what vLLM's order of filters leaves, alone or in a batch."""

import math
from collections.abc import Sequence as Collection
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling import sampling_filters
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_kernels.backend import select_backend

Floats = npt.NDArray[np.float64]

VOCAB = 64
EOS = 5


def make_seq(
    seed: int = 0,
    *,
    prompt: int = 3,
    output: Collection[int] = (),
    seq_id: str = "s",
    given: SamplingParams | None = None,
    **params: Any,
) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        prompt_ids=list(range(prompt)),
        params=given or SamplingParams(**params),
        seed=seed,
        output_ids=list(output),
    )


def random_logits(
    rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 3
) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def reference_probs(logits: torch.Tensor, params: SamplingParams) -> Floats:
    """The distribution after all filters: float64, by sorting, one row."""
    scores = logits.double().numpy() / max(params.temperature, 0.01)
    weights = np.exp(scores - scores.max())
    weights[weights < params.min_p * weights.max()] = 0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[::-1][min(params.top_k, len(weights)) - 1]] = 0
    order = np.argsort(-weights, kind="stable")
    total, mass, kept = weights.sum(), 0.0, set()
    for token in order:
        if mass >= params.top_p * total and params.top_p < 1:
            break
        kept.add(token)
        mass += weights[token]
    least = min(weights[token] for token in kept)
    weights[weights < least] = 0
    probs: Floats = weights / weights.sum()
    return probs


def filtered(logits: torch.Tensor, all_params: Collection[SamplingParams]) -> torch.Tensor:
    """What the sampler hands to the draw."""
    seen: list[torch.Tensor] = []

    def spy(
        logits: torch.Tensor, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(dim=1)

    seqs = [make_seq(given=params) for params in all_params]
    Sampler(gumbel_argmax=spy).sample(logits, seqs)
    return seen[0]


def sample(sampler: Sampler, logits: torch.Tensor, seqs: Collection[Sequence]) -> list[int]:
    return [token.id for token in sampler.sample(logits, seqs)]


def test_greedy_rows_take_the_likeliest_token() -> None:
    logits = random_logits(20)
    seqs = [
        make_seq(seed, temperature=temperature) for seed in range(10) for temperature in (0, 1e-6)
    ]
    assert sample(Sampler(), logits, seqs) == np.argmax(logits.numpy(), axis=1).tolist()


def test_the_caller_keeps_its_logits() -> None:
    logits = random_logits(3)
    before = logits.clone()
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "min_tokens": 2,
    }
    sample(Sampler([EOS]), logits, [make_seq(1, **params) for _ in range(3)])
    sample(Sampler([EOS]), logits, [make_seq(temperature=0.0, min_tokens=2) for _ in range(3)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_row_gives_the_same_token_alone_and_in_a_batch(backend: str) -> None:
    gumbel_argmax = select_backend(torch.device("cpu"), prefer=backend).gumbel_argmax
    sampler = Sampler([EOS], gumbel_argmax=gumbel_argmax)
    logits = random_logits(16, 5000)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 2.0, "top_p": 0.999},
    ]
    seqs = [make_seq(7 * row, prompt=row + 1, **kinds[row % len(kinds)]) for row in range(16)]
    together = sample(sampler, logits, seqs)
    alone = [sample(sampler, logits[row : row + 1], [seq])[0] for row, seq in enumerate(seqs)]
    assert together == alone
    order = list(range(15, -1, -1))
    assert sample(sampler, logits[order], [seqs[row] for row in order]) == together[::-1]


def test_the_draw_depends_on_seed_and_position_and_on_nothing_else() -> None:
    logits = torch.zeros(1, 5000)

    def draw(seq: Sequence) -> int:
        return sample(Sampler(), logits, [seq])[0]

    base = draw(make_seq(1, prompt=3, output=[9, 9]))
    assert draw(make_seq(1, prompt=5)) == base
    assert draw(make_seq(1, prompt=1, output=[4] * 4, seq_id="other")) == base
    others = {draw(make_seq(seed, prompt=5)) for seed in (0, 2, 2**63 - 1)}
    others |= {draw(make_seq(1, prompt=length)) for length in (4, 6)}
    assert len(others | {base}) == 6


# Upper quantiles of the chi-square distribution at 1e-4, by Wilson and Hilferty's approximation.
def chi_square_limit(freedom: int) -> float:
    z = 3.719
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=10),
        SamplingParams(temperature=2.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.05, top_k=30, top_p=0.95),
    ],
    ids=["plain", "cold", "top_k", "top_p", "all"],
)
def test_draws_over_many_positions_follow_the_distribution(params: SamplingParams) -> None:
    num_draws = 20_000
    row = random_logits(1, seed=3, scale=1.5)[0]
    seqs = [make_seq(11, prompt=1, given=params) for _ in range(500)]
    counts = np.zeros(VOCAB)
    sampler = Sampler(gumbel_argmax=select_backend(torch.device("cpu")).gumbel_argmax)
    for start in range(0, num_draws, 500):
        for offset, seq in enumerate(seqs):
            seq.prompt_ids = [0] * (start + offset)
        tokens = sample(sampler, row.expand(500, -1), seqs)
        counts += np.bincount(tokens, minlength=VOCAB)
    expected = reference_probs(row, params) * num_draws
    assert not counts[expected == 0].any()
    frequent = expected >= 5
    rare = (expected > 0) & ~frequent
    observed = np.append(counts[frequent], counts[rare].sum())
    wanted = np.append(expected[frequent], expected[rare].sum())
    used = wanted > 0
    statistic = ((observed - wanted)[used] ** 2 / wanted[used]).sum()
    assert statistic < chi_square_limit(int(used.sum()) - 1)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    temperature=st.sampled_from([0.001, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 17, VOCAB, 10**6]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    coarse=st.booleans(),
)
def test_the_kept_tokens_are_those_of_a_float64_reference(
    seed: int,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    coarse: bool,
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(3, seed=seed, scale=scale)
    if coarse:  # many ties, as in bf16
        logits = (logits * 2).round() / 2
    kept = filtered(logits, [params] * 3)
    for row in range(3):
        probs = reference_probs(logits[row], params)
        is_kept = kept[row].isfinite().numpy()
        wrong = is_kept != (probs > 0)
        unclear = near_a_limit(logits[row], params) | underflows(logits[row], params)
        assert not (wrong & ~unclear).any()
        assert is_kept[int(logits[row].argmax())]


def underflows(logits: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Tokens whose weight the reference rounds to zero, where logits know no such limit."""
    unlimited = params.model_copy(update={"min_p": 0.0, "top_k": -1, "top_p": 1.0})
    return np.asarray(reference_probs(logits, unlimited) == 0)


def near_a_limit(logits: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Tokens that a limit moved by rounding would treat otherwise, with all of their ties."""
    kept = []
    for up, down in product((1 - 1e-5, 1 + 1e-5), repeat=2):
        top_p = params.top_p if params.top_p == 1 else min(1.0, params.top_p * up)
        moved = {"min_p": min(1.0, params.min_p * down), "top_p": top_p}
        kept.append(reference_probs(logits, params.model_copy(update=moved)) > 0)
    return np.asarray(np.any(kept, axis=0) & ~np.all(kept, axis=0))


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    by_rank = filtered(logits, [SamplingParams(top_k=2)])
    by_mass = filtered(logits, [SamplingParams(top_p=0.6)])
    for kept in (by_rank, by_mass):
        assert kept.isfinite().tolist() == [[True, False, True, True, True, False]]


def test_min_p_comes_before_top_k_and_top_k_before_top_p() -> None:
    # 0.5, 0.2, 0.2, 0.1: top_p=0.6 alone keeps three tokens, after top_k=1 just one.
    logits = torch.tensor([[0.5, 0.2, 0.19, 0.11]]).log()
    kept = filtered(logits, [SamplingParams(top_k=2, top_p=0.7)])
    assert kept.isfinite().tolist() == [[True, False, False, False]], "0.5 of 0.7 is 0.71"
    kept = filtered(logits, [SamplingParams(min_p=0.3, top_p=0.75)])
    assert kept.isfinite().tolist() == [[True, True, False, False]], "0.7 of 0.89 is 0.79"


def test_rows_with_and_without_filters_do_not_disturb_each_other() -> None:
    logits = random_logits(6)
    all_params = [
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.5),
        SamplingParams(),
        SamplingParams(temperature=1.7, top_k=9, top_p=0.9, min_p=0.01),
    ]
    together = filtered(logits, all_params)
    for row, params in enumerate(all_params):
        alone = filtered(logits[row : row + 1], [params])
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("vocab", [300, 5000, 50_000])
@pytest.mark.parametrize("top_p", [0.5, 0.99, 0.9999])
def test_a_wide_nucleus_is_found_by_sorting_more(vocab: int, top_p: float) -> None:
    logits = random_logits(4, vocab, scale=0.5)
    logits[1] *= 40
    logits[3] = 0
    kept = logits.clone()
    sampling_filters.apply_top_p(kept, torch.tensor([top_p, top_p, 1.0, top_p]))
    for row in (0, 1):
        probs = np.sort(logits[row].double().softmax(0).numpy())[::-1]
        wanted = 1 + int((probs.cumsum() < top_p).sum())
        assert abs(int(kept[row].isfinite().sum()) - wanted) <= wanted * 1e-4
    assert torch.equal(kept[2], logits[2])
    assert torch.equal(kept[3], logits[3]), "all tokens are tied"


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_min_tokens_forbids_every_stop_until_enough_tokens_are_there(
    temperature: float,
) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 8], logits[0, 9] = 9, 8, 7

    def draw(output: Collection[int] = (), **params: Any) -> int:
        seq = make_seq(output=output, temperature=temperature, min_tokens=2, **params)
        return sample(Sampler([EOS]), logits, [seq])[0]

    assert draw(stop_token_ids=(8,)) == 9
    assert draw(stop_token_ids=(8,), output=[1]) == 9
    assert draw(stop_token_ids=(8,), output=[1, 1]) == EOS
    assert draw(ignore_eos=True) == EOS, "it stops nothing"
    assert draw() == 8


def test_min_tokens_masks_its_own_row_only() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, EOS] = 9
    seqs = [make_seq(temperature=0.0, min_tokens=1), make_seq(temperature=0.0)]
    first, second = sample(Sampler([EOS]), logits, seqs)
    assert first != EOS and second == EOS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_that_are_not_finite_name_the_broken_sequence(
    temperature: float, value: float
) -> None:
    logits = random_logits(2)
    logits[1] = value
    seqs = [make_seq(seq_id=name, temperature=temperature) for name in ("good", "bad")]
    with pytest.raises(ArithmeticError, match=r"for bad$"):
        sample(Sampler(), logits, seqs)


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.full((200, VOCAB), float("-inf"))
    logits[:, 7] = -80.0
    assert set(sample(Sampler(), logits, [make_seq(seed) for seed in range(200)])) == {7}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_tokens_of_the_cpu() -> None:
    logits = random_logits(16, 5000)
    seqs = [make_seq(row, temperature=row % 3, top_k=row % 5, top_p=0.9) for row in range(16)]
    assert sample(Sampler(), logits.cuda(), seqs) == sample(Sampler(), logits, seqs)
