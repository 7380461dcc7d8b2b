"""The Triton kernels in Triton's interpreter, on the CPU, against the float64 reference."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from support import triton_interpreter
from support.attention_cases import Shape, make_problem
from support.triton_matrix import (
    DECODES,
    DTYPES,
    MIXED,
    PREFILLS,
    SHAPES,
    check_paged_attention,
    check_split_decode,
)
from tidemill_kernels import reference, triton_attention
from tidemill_kernels.options import AttentionOptions

pytestmark = pytest.mark.interpret


@pytest.fixture(scope="module", autouse=True)
def corrected_interpreter() -> None:
    triton_interpreter.install()


@triton.jit
def _bfloat16_kernel(a_ptr, b_ptr, product_ptr, sum_ptr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    product = tl.dot(a, b, out_dtype=tl.float32)
    tl.store(product_ptr + at, product.to(tl.bfloat16))
    tl.store(sum_ptr + at, tl.where(a > b, a + b, -a))


def test_the_interpreter_is_right_about_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 16, 16, generator=generator).bfloat16()
    product, total = torch.zeros(2, 16, 16).bfloat16()
    _bfloat16_kernel[(1,)](a, b, product, total)
    assert torch.equal(total, torch.where(a > b, a + b, -a))
    exact = (a.double() @ b.double()).bfloat16()
    # The float32 sum may land on the other side of a bfloat16 rounding boundary, if rarely.
    assert int((product != exact).sum()) <= 2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("lens", [DECODES, PREFILLS], ids=["decodes", "prefills"])
def test_every_shape_equals_the_reference(shape: Shape, lens: tuple[list[int], list[int]]) -> None:
    check_paged_attention(make_problem(shape, *lens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_mixed_step_is_off_by_its_rounding_alone(dtype: torch.dtype, block_size: int) -> None:
    check_paged_attention(make_problem(Shape(9, 3, 64, block_size, dtype), *MIXED))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "num_splits"), [(16, 2), (32, 4), (64, 8)])
def test_a_split_decode_equals_the_reference(
    dtype: torch.dtype, block_size: int, num_splits: int
) -> None:
    # With tiles of 64, the short sequences leave most splits empty.
    shape = Shape(8, 2, 64, block_size, dtype)
    check_split_decode(make_problem(shape, [1, 1, 1], [37, 5, 300]), num_splits)


@pytest.mark.parametrize("seq_len", [1, 16, 63, 64, 65, 128])
def test_decodes_at_the_edges_of_blocks_and_tiles_equal_the_reference(seq_len: int) -> None:
    check_paged_attention(make_problem(Shape(4, 2), [1], [seq_len]))


@pytest.mark.parametrize(
    ("query_len", "seq_len"), [(2, 2), (16, 16), (64, 64), (65, 65), (5, 69), (3, 128), (64, 192)]
)
def test_prefills_at_the_edges_of_blocks_and_tiles_equal_the_reference(
    query_len: int, seq_len: int
) -> None:
    check_paged_attention(make_problem(Shape(4, 2), [query_len], [seq_len]))


def test_a_long_prefill_equals_the_reference() -> None:
    check_paged_attention(make_problem(Shape(8, 1, 128, 16), [150], [300]))


def test_a_padding_row_of_length_0_gets_zeros() -> None:
    problem = make_problem(Shape(), [1, 1], [20, 1])
    problem.metadata.seq_lens[1] = 0
    for num_splits in (1, 4):
        out = problem.poisoned_out()
        triton_attention.decode(
            *(out, problem.query, problem.key_cache, problem.value_cache, problem.metadata),
            *(problem.scale, AttentionOptions()),
            num_splits=num_splits,
        )
        assert not out[1].any()
        assert out[0].isfinite().all()


def test_strided_queries_and_outputs_are_honoured() -> None:
    problem = make_problem(Shape(), *MIXED)
    expected = problem.expected()
    wide = torch.full((problem.query.shape[0], 12, 64), float("nan"))
    wide[:, :8] = problem.query
    out = torch.full((problem.query.shape[0], 2, 8, 64), float("nan"))
    triton_attention.paged_attention(
        *(out[:, 1], wide[:, :8], problem.key_cache, problem.value_cache),
        *(problem.metadata, problem.scale),
    )
    np.testing.assert_allclose(out[:, 1], expected, rtol=0, atol=1e-5)
    assert out[:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 80), (2, 64)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_land_in_their_slots_and_nowhere_else(
    dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int
) -> None:
    fused = torch.randn(9, 3, kv_heads, head_dim).to(dtype)
    key, value = fused[:, 1], fused[:, 2]
    slots = torch.randperm(4 * block_size)[:9]
    slots[3] = -1
    expected = torch.randn(2, 4, kv_heads, block_size, head_dim).to(dtype)
    actual = expected.clone()
    reference.reshape_and_cache(key, value, expected[0], expected[1], slots)
    triton_attention.reshape_and_cache(key, value, actual[0], actual[1], slots)
    assert torch.equal(actual, expected)


def test_a_block_size_without_a_kernel_is_refused_with_the_choices() -> None:
    problem = make_problem(Shape(block_size=4), [1], [5])
    with pytest.raises(ValueError, match=r"block size 4: .* \[16, 32, 64, 128\]"):
        triton_attention.paged_attention(
            *(problem.poisoned_out(), problem.query, problem.key_cache, problem.value_cache),
            *(problem.metadata, problem.scale),
        )
