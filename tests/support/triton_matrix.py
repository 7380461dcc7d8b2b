"""The problems that the Triton kernels are tested on, in the interpreter and on devices."""

from typing import Any

import torch

from support.attention_cases import (
    TOLERANCES,
    Problem,
    Shape,
    as_keywords,
    make_problem,
    relative_error,
)
from tidemill_kernels import triton_attention
from tidemill_kernels.options import AttentionOptions

PLAIN = AttentionOptions()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DECODES = ([1, 1, 1], [37, 5, 100])
PREFILLS = ([7, 33, 1, 16], [40, 33, 65, 64])
MIXED = ([1, 1, 7, 33, 1], [48, 1, 23, 33, 130])
SHAPES = {
    "8:2 blocks of 16": Shape(),
    "8:2 blocks of 32": Shape(block_size=32),
    "8:2 blocks of 64": Shape(block_size=64),
    "8:2 blocks of 128": Shape(block_size=128),
    "9:3": Shape(9, 3),
    "71:1": Shape(71, 1),
    "head_dim 80": Shape(8, 2, 80),
    "head_dim 72": Shape(4, 2, 72),
}

#: Arguments of `make_options`.
OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": {"window": 1},
    "window of 20": {"window": 20},
    "window of 64": {"window": 64},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"with_sinks": True},
    "everything": {"window": 33, "soft_cap": 1.5, "with_sinks": True},
}


def check_paged_attention(
    problem: Problem, options: AttentionOptions = PLAIN, *, tolerance: float | None = None
) -> None:
    """Assert that the Triton result is the reference's but for the rounding of its dtype."""
    out = problem.poisoned_out()
    triton_attention.paged_attention(
        *(out, problem.query, problem.key_cache, problem.value_cache, problem.metadata),
        problem.scale,
        **as_keywords(options),
    )
    check(problem, out, options, tolerance=tolerance)


def check_split_decode(
    problem: Problem,
    num_splits: int,
    options: AttentionOptions = PLAIN,
    *,
    tolerance: float | None = None,
) -> None:
    """Assert the same of a decode that is split into `num_splits`."""
    out = problem.poisoned_out()
    triton_attention.decode(
        *(out, problem.query, problem.key_cache, problem.value_cache, problem.metadata),
        *(problem.scale, options),
        num_splits=num_splits,
    )
    check(problem, out, options, tolerance=tolerance)


def check(
    problem: Problem,
    out: torch.Tensor,
    options: AttentionOptions = PLAIN,
    *,
    tolerance: float | None = None,
) -> None:
    """Assert that `out` is the reference's result but for the rounding of its dtype."""
    assert relative_error(out, problem.expected(options)) <= (tolerance or TOLERANCES[out.dtype])


__all__ = [
    "DECODES",
    "DTYPES",
    "MIXED",
    "OPTIONS",
    "PLAIN",
    "PREFILLS",
    "SHAPES",
    "Shape",
    "check_paged_attention",
    "check_split_decode",
    "make_problem",
]
