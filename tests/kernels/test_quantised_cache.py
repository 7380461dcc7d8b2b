"""Quantised KV caches on the CPU: codes, their error, and attention over what they stand for."""

import dataclasses

import pytest
import torch

from support.attention_cases import TOLERANCES, Shape, make_options, make_problem, relative_error
from support.quantised_caches import (
    DTYPES,
    HALF_STEPS,
    QuantisedProblem,
    dequantise,
    make_cache,
    quantise_problem,
)
from tidemill_kernels import AttentionBackend, KVScales, reference, select_backend
from tidemill_kernels.options import AttentionOptions

CPU = torch.device("cpu")
MIXED = ([1, 1, 1, 7, 33, 16, 2], [37, 5, 1, 40, 33, 48, 700])
SHAPES = {
    "9:3": Shape(9, 3),
    "one KV head of 71": Shape(71, 1, 32),
    "head_dim 72, blocks of 7": Shape(10, 2, 72, block_size=7),
    "head_dim 20": Shape(4, 2, 20),
    "head_dim 128, bfloat16": Shape(8, 2, 128, dtype=torch.bfloat16),
    "head_dim 40, bfloat16": Shape(6, 2, 40, block_size=32, dtype=torch.bfloat16),
    "float16": Shape(4, 2, dtype=torch.float16),
}


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return select_backend(CPU, prefer=request.param)


def attend(
    backend: AttentionBackend, problem: QuantisedProblem, options: AttentionOptions
) -> torch.Tensor:
    plain = problem.plain
    out = plain.poisoned_out()
    backend.paged_attention(
        *(out, plain.query, problem.key_cache, problem.value_cache, plain.metadata, plain.scale),
        window=options.window,
        soft_cap=options.soft_cap,
        sinks=options.sinks,
        scales=problem.scales,
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_is_that_over_the_numbers_the_codes_stand_for(
    backend: AttentionBackend, shape: Shape, dtype: torch.dtype
) -> None:
    problem = quantise_problem(make_problem(shape, *MIXED), dtype)
    out = attend(backend, problem, AttentionOptions())
    assert relative_error(out, problem.expected()) <= TOLERANCES[shape.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options_are_heeded_and_blocks_behind_the_window_not_read(
    backend: AttentionBackend, dtype: torch.dtype
) -> None:
    plain = make_problem(Shape(), *MIXED)
    problem = quantise_problem(plain, dtype)
    plain.forget_blocks_before_windows(20)
    options = make_options(8, window=20, soft_cap=2.0, with_sinks=True)
    out = attend(backend, problem, options)
    assert relative_error(out, problem.expected(options)) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_computes_in_float64_over_the_same_numbers(dtype: torch.dtype) -> None:
    problem = quantise_problem(make_problem(Shape(), [1, 7], [20, 23]), dtype)
    plain, out = problem.plain, torch.empty(8, 8, 64, dtype=torch.float64)
    reference.paged_attention(
        *(out, plain.query, problem.key_cache, problem.value_cache, plain.metadata, plain.scale),
        scales=problem.scales,
    )
    assert relative_error(out, problem.expected()) <= 1e-14


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_write_the_codes_and_scales_of_the_reference_and_nothing_else(
    backend: AttentionBackend, dtype: torch.dtype, source: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(300, 3, 3, 20, generator=generator)
    # From the smallest numbers of float16 up to its largest, and rows of zeros.
    fused *= 10.0 ** torch.randint(-6, 4, (300, 3, 3, 1), generator=generator)
    fused[7] = 0.0
    fused = fused.to(source)
    slots = torch.randperm(22 * 16, generator=generator)[:300]
    slots[::5] = -1
    written = []
    for implementation in (reference, backend):
        cache, scales = make_cache((22, 3, 16, 20), dtype)
        implementation.reshape_and_cache(fused[:, 1], fused[:, 2], *cache, slots, scales)
        bits = [tensor.view(torch.uint8) for tensor in (*cache, scales.keys, scales.values)]
        written.append(bits)
    assert all(map(torch.equal, *written))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_the_nearest_numbers_that_there_are(
    backend: AttentionBackend, dtype: torch.dtype
) -> None:
    rows = torch.randn(64, 2, 40, generator=torch.Generator().manual_seed(3)).double()
    rows *= 10.0 ** torch.linspace(-20, 20, 64)[:, None, None]
    cache, scales = make_cache((4, 2, 16, 40), dtype)
    rows = rows.float()
    backend.reshape_and_cache(rows, rows, *cache, torch.arange(64), scales)
    found = dequantise(cache[0], scales.keys).transpose(1, 2).reshape(64, 2, 40)
    exact, scale = rows.double(), scales.keys.transpose(1, 2).reshape(64, 2, 1).double()
    relative, absolute = HALF_STEPS[dtype]
    # Float32 arithmetic may choose the other of two numbers that are equally near but for its
    # rounding.
    bound = torch.maximum(exact.abs() * relative, scale * absolute) * (1 + 1e-5)
    assert bool(((found - exact).abs() <= bound).all())
    assert relative_error(found, exact) > 1e-4


def test_codes_of_floats_are_those_that_torch_rounds_to(backend: AttentionBackend) -> None:
    # A row whose largest number is the format's own has a scale of 1.
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        exponents = torch.linspace(-30, 8.8 if largest == 448.0 else 15.8, 4000)
        row = 2.0**exponents * torch.where(torch.arange(4000) % 2 == 0, 1.0, -1.0)
        every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        every = every[every.isfinite()]
        middles = (every.sort().values[1:] + every.sort().values[:-1]) / 2
        row = torch.cat((row, every, middles, torch.tensor([largest])))[None, None]
        cache, scales = make_cache((1, 1, 1, row.shape[2]), dtype)
        backend.reshape_and_cache(row, row, *cache, torch.tensor([0]), scales)
        assert scales.keys.item() == 1.0
        assert torch.equal(cache[0].view(torch.uint8).flatten(), _torch_codes(row, dtype))


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(backend: AttentionBackend) -> None:
    for dtype in DTYPES:
        rows = torch.randn(3, 2, 24)
        rows[0, 0, 3], rows[2, 1, 20] = float("nan"), float("inf")
        cache, scales = make_cache((1, 2, 4, 24), dtype)
        backend.reshape_and_cache(rows, rows, *cache, torch.arange(3), scales)
        spoilt = scales.keys[0, :, :3].isnan()
        assert spoilt.nonzero().tolist() == [[0, 0], [1, 2]]


def test_scales_that_do_not_fit_the_cache_are_refused_by_name(backend: AttentionBackend) -> None:
    problem = quantise_problem(make_problem(Shape(), [1], [5]), torch.int8)
    wrong = KVScales(problem.scales.keys[:-1], problem.scales.values)
    with pytest.raises(ValueError, match="key scales must be float32"):
        attend(backend, dataclasses.replace(problem, scales=wrong), AttentionOptions())
    with pytest.raises(ValueError, match="scales go with a cache of"):
        attend(backend, dataclasses.replace(problem, scales=None), AttentionOptions())


def test_a_slot_beyond_a_quantised_cache_is_refused_and_nothing_is_written() -> None:
    cache, scales = make_cache((4, 2, 16, 24), torch.int8)
    before = scales.keys.clone()
    with pytest.raises(IndexError, match="token 1: slot 64 is beyond the 64 slots"):
        select_backend(CPU, prefer="native").reshape_and_cache(
            *(torch.ones(2, 2, 24), torch.ones(2, 2, 24)), *cache, torch.tensor([0, 64]), scales
        )
    assert torch.equal(scales.keys.view(torch.int32), before.view(torch.int32))


def _torch_codes(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return row.to(dtype).view(torch.uint8).flatten()
