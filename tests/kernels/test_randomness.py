"""Philox against its published vectors, and seeded sampling against its definition."""

import math

import pytest
import torch

from tidemill_kernels import AttentionBackend, randomness, select_backend
from tidemill_kernels.native.library import load_library
from tidemill_kernels.native.randomness import NativeRandomness

CPU = torch.device("cpu")
# Known answers for philox4x32-10 from the Random123 distribution (kat_vectors):
# counter, key, output.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.fixture(scope="module")
def native() -> NativeRandomness:
    return NativeRandomness(load_library())


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return select_backend(CPU, prefer=request.param)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    words = randomness.philox4x32((c0, c1, c2, c3), (k0, k1))
    assert [int(word) for word in words] == expected


def test_native_uniforms_follow_the_published_answers(native: NativeRandomness) -> None:
    # Counter 0 and key 0 are seed 0, choice 0, position 0, tokens 0 to 3.
    expected = [((x >> 9) + 0.5) * 2.0**-23 for x in KNOWN_ANSWERS[0][2]]
    assert native.philox_uniform(0, 0, 0, torch.arange(4)).tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0])
@pytest.mark.parametrize(("choice", "position"), [(0, 0), (7, 123_456), (2**31 - 1, 2**31 - 1)])
def test_native_and_torch_uniforms_are_the_same_bits(
    native: NativeRandomness, seed: int, choice: int, position: int
) -> None:
    tokens = torch.cat([torch.arange(1003), torch.tensor([151_935, 2**31, 2**34 - 1])])
    ours = native.philox_uniform(seed, choice, position, tokens)
    assert torch.equal(ours, randomness.philox_uniform(seed, choice, position, tokens))


def test_uniforms_lie_strictly_between_0_and_1_and_are_exact() -> None:
    words = torch.tensor([0, 0xFFFFFFFF, 0x80000000, 0x1FF])
    exact = (words >> 9).double() * 2.0**-23 + 2.0**-24
    assert torch.equal(randomness.word_to_uniform(words).double(), exact)
    assert 0.0 < float(exact.min()) < float(exact.max()) < 1.0


def test_uniforms_are_uniform(native: NativeRandomness) -> None:
    draws = native.philox_uniform(42, 0, 0, torch.arange(100_000))
    counts = torch.histc(draws, bins=100, min=0.0, max=1.0)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    # 99 degrees of freedom: the 0.01 % and 99.99 % points.
    assert 56 < chi_square < 160


def test_a_seed_and_its_signed_twin_are_the_same(native: NativeRandomness) -> None:
    tokens = torch.arange(64)
    for draw in (native.philox_uniform, randomness.philox_uniform):
        assert torch.equal(draw(-1, 0, 5, tokens), draw(2**64 - 1, 0, 5, tokens))


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    choices = torch.randint(0, 8, (count,), generator=generator).int()
    positions = torch.randint(0, 4096, (count,), generator=generator).int()
    return seeds, choices, positions


@pytest.mark.parametrize("vocab", [1, 3, 31, 32, 33, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_native_and_torch_pick_the_same_tokens(
    native: NativeRandomness, vocab: int, spread: float
) -> None:
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[:, ::7] = float("-inf")
    ours = native.gumbel_argmax(logits, *rows(24))
    assert torch.equal(ours, randomness.gumbel_argmax(logits, *rows(24)))


def test_sampling_is_the_argmax_of_logit_plus_gumbel_noise(backend: AttentionBackend) -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    seeds, choices, positions = rows(5)
    picked = backend.gumbel_argmax(logits, seeds, choices, positions)
    for row in range(5):
        uniform = randomness.philox_uniform(
            int(seeds[row]), int(choices[row]), int(positions[row]), torch.arange(50)
        )
        scores = [
            x - math.log(-math.log(u))
            for x, u in zip(logits[row].tolist(), uniform.tolist(), strict=True)
        ]
        assert int(picked[row]) == scores.index(max(scores))


def test_samples_follow_the_softmax(backend: AttentionBackend) -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.2, 0.07, 0.03])
    count = 8000
    logits = probabilities.log().expand(count, -1)
    positions = torch.arange(count, dtype=torch.int32)
    picked = backend.gumbel_argmax(
        logits, torch.full((count,), 77), torch.zeros(count, dtype=torch.int32), positions
    )
    expected = probabilities * count
    observed = torch.bincount(picked, minlength=5)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    # 4 degrees of freedom: the 99.99 % point.
    assert chi_square < 23.5


def test_tokens_that_are_not_finite_are_never_picked(backend: AttentionBackend) -> None:
    logits = torch.full((3, 100), float("-inf"))
    logits[0, 41] = -1e30
    logits[1] = float("nan")
    logits[1, 99] = 0.0
    logits[1, 3] = float("inf")
    assert backend.gumbel_argmax(logits, *rows(3)).tolist() == [41, 99, -1]


def test_a_draw_depends_on_its_own_row_alone(backend: AttentionBackend) -> None:
    logits = torch.randn(9, 333)
    keys = rows(9)
    together = backend.gumbel_argmax(logits, *keys)
    alone = [
        backend.gumbel_argmax(logits[i : i + 1], *(key[i : i + 1] for key in keys))
        for i in range(9)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_logits_with_a_row_stride_are_read_where_they_are(backend: AttentionBackend) -> None:
    wide = torch.randn(4, 200)
    picked = backend.gumbel_argmax(wide[:, :130], *rows(4))
    assert torch.equal(picked, backend.gumbel_argmax(wide[:, :130].contiguous(), *rows(4)))


def test_misfitting_rows_are_refused_by_name(backend: AttentionBackend) -> None:
    seeds, choices, positions = rows(2)
    with pytest.raises(ValueError, match=r"choices must be torch\.int32 \[2\]"):
        backend.gumbel_argmax(torch.zeros(2, 4), seeds, choices.long(), positions)
