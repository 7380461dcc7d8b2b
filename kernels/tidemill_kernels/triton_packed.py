# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Products with packed weights of 4 and 8 bits: the weight becomes plain in registers only."""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from tidemill_kernels.packed_weight import CodeKind, PackedWeight

#: Products need 16 columns at least.
_MIN_TILE = 16
_TILE = 64


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Tile sizes and compiler options of one launch; ``block_k`` never crosses a group."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def tiles(self) -> dict[str, int]:
        """Return the constexpr arguments of the kernel."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}

    def options(self) -> dict[str, int]:
        """Return the compiler options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def product_shape(num_rows: int, element_size: int, tile_k: int) -> ProductShape:
    """Return the launch for ``num_rows`` rows of x with elements of so many bytes.

    The figures come from compiling for sm_80, sm_90 and sm_100; they have not been timed on a
    device yet.
    """
    is_short = num_rows <= 16
    if element_size == 4:
        # Float32 is multiplied without tensor cores, from registers: wider tiles spill.
        rows, num_warps, num_stages = (16, 4, 3) if is_short else (32, 8, 2)
        return ProductShape(rows, 32, min(tile_k, 32), num_warps, num_stages)
    if is_short:
        return ProductShape(16, 32, tile_k, num_warps=4, num_stages=3)
    return ProductShape(64, 64, tile_k, num_warps=8, num_stages=3)


def tile_columns(weight: PackedWeight) -> int:
    """Return the largest tile of columns that lies within groups, 0 if there is none."""
    if weight.scales.shape[1] == 1:
        return _TILE
    tile = gcd(weight.group_size, _TILE)
    return tile if tile >= _MIN_TILE else 0


def supports(weight: PackedWeight) -> bool:
    """Whether ``multiply`` computes this weight."""
    return tile_columns(weight) > 0


def multiply(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return ``x @ weight.T`` [rows, out_features] in x's dtype; sums are in float32.

    ``x`` is [rows, in_features] with its columns in the order of ``weight.order``.
    """
    assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.out_features)
    if not out.numel():
        return out
    shape = product_shape(x.shape[0], x.element_size(), tile_columns(weight))
    grid = (triton.cdiv(x.shape[0], shape.block_m), triton.cdiv(weight.out_features, shape.block_n))
    table = weight.table
    packed_matmul_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if table is None else table,
        out,
        x.shape[0],
        weight.out_features,
        weight.in_features,
        weight.scales.shape[1],
        16 if table is not None and len(table) > 1 else 0,
        KIND=int(weight.kind),
        PER_BYTE=weight.kind.per_byte,
        HAS_ZEROS=weight.zeros is not None,
        GROUP_SIZE=weight.group_size,
        **shape.tiles(),
        **shape.options(),
    )
    return out


_FP8 = tl.constexpr(int(CodeKind.FP8))
_TABLE4 = tl.constexpr(int(CodeKind.TABLE4))


@triton.jit
def packed_matmul_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    out_ptr,
    num_rows,
    out_features,
    in_features,
    num_groups,
    table_stride,
    KIND: tl.constexpr,
    PER_BYTE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of rows, blocks of out_features): one program computes one tile of out."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_ok, columns_ok = rows < num_rows, columns < out_features
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * in_features + inner[None, :]
    group_at = columns.to(tl.int64) * num_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        x_ok = rows_ok[:, None] & (start + inner < in_features)[None, :]
        x = tl.load(x_at + start, mask=x_ok, other=0.0)
        codes = _load_codes(codes_ptr, columns, columns_ok, start, in_features, PER_BYTE, BLOCK_K)
        values = _decode(codes, table_ptr, columns, columns_ok, table_stride, KIND)
        group = start // GROUP_SIZE
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + group_at + group, mask=columns_ok, other=0.0)
            values -= zeros.to(tl.float32)[:, None]
        scales = tl.load(scales_ptr + group_at + group, mask=columns_ok, other=0.0)
        weight = (values * scales.to(tl.float32)[:, None]).to(x.dtype)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    at = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & columns_ok[None, :])


@triton.jit
def _load_codes(
    codes_ptr,
    columns,
    columns_ok,
    start,
    in_features,
    PER_BYTE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return uint8 codes [BLOCK_N, BLOCK_K] of the columns of x from ``start`` on."""
    if PER_BYTE == 1:
        at = start + tl.arange(0, BLOCK_K)
        ok = columns_ok[:, None] & (at < in_features)[None, :]
        first = columns.to(tl.int64) * in_features
        return tl.load(codes_ptr + first[:, None] + at[None, :], mask=ok, other=0)
    at = start // 2 + tl.arange(0, BLOCK_K // 2)
    ok = columns_ok[:, None] & (at < in_features // 2)[None, :]
    first = columns.to(tl.int64) * (in_features // 2)
    pairs = tl.load(codes_ptr + first[:, None] + at[None, :], mask=ok, other=0)
    return tl.interleave(pairs & 15, pairs >> 4)


@triton.jit
def _decode(codes, table_ptr, columns, columns_ok, table_stride, KIND: tl.constexpr):
    """Return the float32 values that codes [BLOCK_N, BLOCK_K] stand for."""
    if KIND == _FP8:
        # As a float16 the bits are the value over 2^8, subnormals included: float16 has one bit
        # of exponent more. So it works on GPUs without fp8 too.
        bits = codes.to(tl.uint16)
        half = ((bits & 128) << 8) | ((bits & 127) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    if KIND == _TABLE4:
        at = table_ptr + columns.to(tl.int64)[:, None] * table_stride + codes.to(tl.int32)
        return tl.load(at, mask=columns_ok[:, None], other=0.0)
    return codes.to(tl.float32)
