"""The Triton kernels on a CUDA device, through the backend that a worker would get."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.attention_cases import Shape, make_options, make_problem
from support.triton_matrix import (
    DECODES,
    DTYPES,
    MIXED,
    OPTIONS,
    PREFILLS,
    SHAPES,
    check,
    check_paged_attention,
    check_split_decode,
)
from tidemill_kernels import AttentionBackend, randomness, reference, select_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def backend() -> AttentionBackend:
    backend = select_backend(torch.device("cuda"))
    assert backend.name == "triton"
    return backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("lens", [DECODES, PREFILLS, MIXED], ids=["decodes", "prefills", "mixed"])
def test_every_shape_equals_the_reference(
    shape: Shape, lens: tuple[list[int], list[int]], dtype: torch.dtype
) -> None:
    exact = Shape(shape.num_heads, shape.kv_heads, shape.head_dim, shape.block_size, dtype)
    check_paged_attention(make_problem(exact, *lens, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "num_splits"), [(16, 2), (32, 8), (64, 32)])
def test_a_split_decode_equals_the_reference(
    dtype: torch.dtype, block_size: int, num_splits: int
) -> None:
    shape = Shape(8, 2, 128, block_size, dtype)
    check_split_decode(make_problem(shape, [1, 1, 1], [37, 5, 2000], device="cuda"), num_splits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_equal_the_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    problem = make_problem(Shape(8, 2, 128, 16, dtype), *MIXED, device="cuda")
    given = make_options(8, **options)
    if given.sinks is not None:
        given = dataclasses.replace(given, sinks=given.sinks.cuda())
    # A float32 tanh that is computed from an exponential loses some bits.
    check_paged_attention(problem, given, tolerance=2e-6 if dtype == torch.float32 else None)


def test_the_backend_of_a_gpu_attends_like_the_reference(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(dtype=torch.bfloat16), *MIXED, device="cuda")
    out = problem.poisoned_out()
    backend.paged_attention(
        out, problem.query, problem.key_cache, problem.value_cache, problem.metadata, problem.scale
    )
    check(problem, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_land_in_their_slots_and_nowhere_else(
    backend: AttentionBackend, dtype: torch.dtype
) -> None:
    fused = torch.randn(50, 3, 3, 80, device="cuda").to(dtype)
    key, value = fused[:, 1], fused[:, 2]
    slots = torch.randperm(64, device="cuda")[:50]
    slots[::7] = -1
    expected = torch.randn(2, 4, 3, 16, 80, device="cuda").to(dtype)
    actual = expected.clone()
    reference.reshape_and_cache(key, value, expected[0], expected[1], slots)
    backend.reshape_and_cache(key, value, actual[0], actual[1], slots)
    assert torch.equal(actual, expected)


def test_a_gpu_samples_the_same_tokens_as_the_cpu(backend: AttentionBackend) -> None:
    logits = torch.randn(6, 5000)
    keys = (
        torch.randint(-(2**62), 2**62, (6,)),
        torch.arange(6, dtype=torch.int32),
        torch.full((6,), 77, dtype=torch.int32),
    )
    on_gpu = backend.gumbel_argmax(logits.cuda(), *(key.cuda() for key in keys))
    assert torch.equal(on_gpu.cpu(), randomness.gumbel_argmax(logits, *keys))
