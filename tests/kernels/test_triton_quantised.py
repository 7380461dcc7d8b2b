"""Triton kernels on quantised caches, in the interpreter, against float64 and the CPU's codes."""

import pytest
import torch

pytest.importorskip("triton")

from support import triton_interpreter
from support.attention_cases import TOLERANCES, Shape, make_options, make_problem, relative_error
from support.quantised_caches import DTYPES, QuantisedProblem, make_cache, quantise_problem
from tidemill_kernels import reference, triton_attention
from tidemill_kernels.options import AttentionOptions

pytestmark = pytest.mark.interpret

MIXED = ([1, 1, 7, 33, 1], [48, 1, 23, 33, 130])
SHAPES = {
    "float32": Shape(),
    "head_dim 80, bfloat16": Shape(8, 2, 80, dtype=torch.bfloat16),
    "blocks of 64, float16": Shape(9, 3, 64, 64, torch.float16),
}


@pytest.fixture(scope="module", autouse=True)
def corrected_interpreter() -> None:
    triton_interpreter.install()


def attend(problem: QuantisedProblem, options: AttentionOptions) -> torch.Tensor:
    plain = problem.plain
    out = plain.poisoned_out()
    triton_attention.paged_attention(
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
    shape: Shape, dtype: torch.dtype
) -> None:
    problem = quantise_problem(make_problem(shape, *MIXED), dtype)
    out = attend(problem, AttentionOptions())
    assert relative_error(out, problem.expected()) <= TOLERANCES[shape.dtype]


def test_options_are_heeded_and_blocks_behind_the_window_not_read() -> None:
    plain = make_problem(Shape(), *MIXED)
    problem = quantise_problem(plain, torch.int8)
    plain.forget_blocks_before_windows(33)
    options = make_options(8, window=33, soft_cap=1.5, with_sinks=True)
    error = relative_error(attend(problem, options), problem.expected(options))
    assert error <= TOLERANCES[torch.float32]


def test_a_split_decode_equals_the_reference() -> None:
    problem = quantise_problem(make_problem(Shape(), [1, 1], [37, 300]), torch.float8_e4m3fn)
    plain, out = problem.plain, problem.plain.poisoned_out()
    triton_attention.decode(
        *(out, plain.query, problem.key_cache, problem.value_cache, plain.metadata, plain.scale),
        *(AttentionOptions(), problem.scales),
        num_splits=4,
    )
    assert relative_error(out, problem.expected()) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales_are_those_of_the_reference(
    dtype: torch.dtype, source: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(30, 3, 3, 80, generator=generator)
    fused *= 10.0 ** torch.randint(-6, 4, (30, 3, 3, 1), generator=generator)
    fused[7] = 0.0
    fused[9, 1, 0, 5], fused[9, 2, 1, 79] = float("nan"), float("-inf")
    fused = fused.to(source)
    slots = torch.randperm(4 * 16, generator=generator)[:30]
    slots[::5] = -1
    written = []
    for implementation in (reference, triton_attention):
        cache, scales = make_cache((4, 3, 16, 80), dtype)
        implementation.reshape_and_cache(fused[:, 1], fused[:, 2], *cache, slots, scales)
        bits = [tensor.view(torch.uint8) for tensor in (*cache, scales.keys, scales.values)]
        written.append(bits)
    assert all(map(torch.equal, *written))
