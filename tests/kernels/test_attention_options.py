"""Sliding windows, soft caps and sinks on the CPU against the float64 reference."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from support.attention_cases import (
    TOLERANCES,
    Problem,
    Shape,
    as_keywords,
    make_options,
    make_problem,
    relative_error,
)
from tidemill_kernels import AttentionBackend, reference, select_backend
from tidemill_kernels.options import AttentionOptions

CPU = torch.device("cpu")
MIXED = ([1, 1, 1, 7, 2, 70], [37, 5, 700, 40, 650, 180])
OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": {"window": 1},
    "window of 16": {"window": 16},
    "window of 600": {"window": 600},
    "window beyond all": {"window": 2**31},
    "soft cap": {"soft_cap": 2.0},
    "window and sinks": {"window": 20, "with_sinks": True},
    "everything": {"window": 65, "soft_cap": 1.5, "with_sinks": True},
}
SHAPES = {
    "grouped 8:2": Shape(),
    "71:1 head_dim 80": Shape(71, 1, 80),
    "head_dim 128 blocks of 7": Shape(8, 1, 128, 7),
    "head_dim 256 blocks of 64": Shape(4, 2, 256, 64),
    "head_dim 12": Shape(4, 2, 12),
}


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return select_backend(CPU, prefer=request.param)


def attend(backend: AttentionBackend, problem: Problem, options: AttentionOptions) -> torch.Tensor:
    out = problem.poisoned_out()
    backend.paged_attention(
        *(out, problem.query, problem.key_cache, problem.value_cache, problem.metadata),
        problem.scale,
        **as_keywords(options),
    )
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_equal_the_float64_reference(
    backend: AttentionBackend, shape: Shape, options: dict[str, Any]
) -> None:
    problem, given = make_problem(shape, *MIXED), make_options(shape.num_heads, **options)
    out = attend(backend, problem, given)
    assert relative_error(out, problem.expected(given)) <= TOLERANCES[torch.float32]


def test_options_in_bfloat16_are_off_by_its_rounding_alone(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(9, 3, dtype=torch.bfloat16), *MIXED)
    options = make_options(9, **OPTIONS["everything"])
    out = attend(backend, problem, options)
    assert relative_error(out, problem.expected(options)) <= TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 128])
def test_windows_at_the_edges_of_blocks_and_chunks_equal_the_reference(
    backend: AttentionBackend, length: int
) -> None:
    problem = make_problem(Shape(4, 2), [1, 70], [130, 131])
    options = make_options(4, window=length)
    out = attend(backend, problem, options)
    assert relative_error(out, problem.expected(options)) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("window", [1, 16, 50])
def test_blocks_before_every_window_are_never_read(backend: AttentionBackend, window: int) -> None:
    problem = make_problem(Shape(), *MIXED)
    options = make_options(8, window=window)
    expected = problem.expected(options)
    problem.forget_blocks_before_windows(window)
    assert int((problem.metadata.block_tables == 2**30).sum()) > 30
    assert relative_error(attend(backend, problem, options), expected) <= 1e-6


def test_scores_far_beyond_the_cap_are_cut_off(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(4, 2), *MIXED)
    problem = dataclasses.replace(problem, query=problem.query * 1000)
    options = make_options(4, soft_cap=5.0)
    out = attend(backend, problem, options)
    assert relative_error(out, problem.expected(options)) <= 1e-4


def test_the_reference_is_dense_attention_with_a_mask() -> None:
    problem, window = make_problem(Shape(4, 4, 32), [50], [50]), 13
    out = torch.empty(problem.query.shape, dtype=torch.float64)
    reference.paged_attention(
        *(out, problem.query, problem.key_cache, problem.value_cache, problem.metadata),
        problem.scale,
        window=window,
    )
    table = problem.metadata.block_tables[0].long()
    keys, values = (
        cache[table].transpose(1, 2).reshape(-1, 4, 32)[:50].transpose(0, 1).double()
        for cache in (problem.key_cache, problem.value_cache)
    )
    distance = torch.arange(50)[:, None] - torch.arange(50)[None, :]
    dense = functional.scaled_dot_product_attention(
        *(problem.query.transpose(0, 1).double(), keys, values),
        attn_mask=(distance >= 0) & (distance < window),
    )
    torch.testing.assert_close(out, dense.transpose(0, 1), atol=1e-12, rtol=0.0)


def test_a_sink_weighs_as_much_as_a_token_of_its_score_and_adds_nothing() -> None:
    problem = make_problem(Shape(2, 1, 8), [1], [1])
    score = (problem.query[0] @ problem.key_cache[problem.metadata.block_tables[0, 0], 0, 0]).mul(
        problem.scale
    )
    options = AttentionOptions(sinks=score + math.log(3.0))
    value = problem.value_cache[problem.metadata.block_tables[0, 0], 0, 0].double()
    torch.testing.assert_close(
        problem.expected(options)[0], (value / 4).expand(2, 8), atol=1e-6, rtol=0.0
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": -1}, "window"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"soft_cap": float("nan")}, "soft_cap"),
        ({"sinks": torch.zeros(7)}, "sinks"),
        ({"sinks": torch.zeros(8, dtype=torch.float64)}, "sinks"),
    ],
)
def test_impossible_options_are_refused_by_name(
    backend: AttentionBackend, options: dict[str, Any], named: str
) -> None:
    problem = make_problem(Shape(), [1], [5])
    with pytest.raises(ValueError, match=named):
        backend.paged_attention(
            *(problem.poisoned_out(), problem.query, problem.key_cache, problem.value_cache),
            *(problem.metadata, problem.scale),
            **options,
        )
