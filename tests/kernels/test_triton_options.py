"""Windows, soft caps and sinks of the Triton kernels in the interpreter against the reference."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support import triton_interpreter
from support.attention_cases import Shape, make_options, make_problem
from support.triton_matrix import (
    MIXED,
    OPTIONS,
    check_paged_attention,
    check_split_decode,
)
from tidemill_kernels import triton_attention

pytestmark = pytest.mark.interpret
#: float32 tanh of small scores loses some bits, since it is computed as 1 - 2 / (1 + exp(2 x)).
SOFT_CAP_TOLERANCE = 2e-6


@pytest.fixture(scope="module", autouse=True)
def corrected_interpreter() -> None:
    triton_interpreter.install()


@pytest.mark.parametrize("block_size", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_of_a_mixed_step_equal_the_reference(
    options: dict[str, Any], block_size: int
) -> None:
    problem = make_problem(Shape(9, 3, 64, block_size), *MIXED)
    check_paged_attention(problem, make_options(9, **options), tolerance=SOFT_CAP_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_options_are_off_by_the_rounding_of_the_dtype_alone(dtype: torch.dtype) -> None:
    problem = make_problem(Shape(8, 2, 64, 16, dtype), *MIXED)
    check_paged_attention(problem, make_options(8, **OPTIONS["everything"]))


@pytest.mark.parametrize("window", [1, 64, 65, 150])
def test_windows_of_split_decodes_equal_the_reference(window: int) -> None:
    problem = make_problem(Shape(4, 2), [1, 1, 1], [37, 5, 300])
    options = make_options(4, window=window, with_sinks=True)
    check_split_decode(problem, 4, options)


@pytest.mark.parametrize("window", [1, 64, 100])
def test_windows_of_long_prefills_equal_the_reference(window: int) -> None:
    problem = make_problem(Shape(4, 1), [150], [300])
    check_paged_attention(problem, make_options(4, window=window))


def test_blocks_before_every_window_are_never_read() -> None:
    window = 50
    problem = make_problem(Shape(4, 2), [1, 1, 40], [200, 37, 290])
    options = make_options(4, window=window)
    expected = problem.expected(options)
    problem.forget_blocks_before_windows(window)
    out = problem.poisoned_out()
    triton_attention.paged_attention(
        *(out, problem.query, problem.key_cache, problem.value_cache, problem.metadata),
        problem.scale,
        window=window,
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0.0)
