# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Numbers of 8 bits in integer arithmetic: the same on every GPU, triton and in the interpreter.

Triton's own 8-bit floats do not compile for sm_80, have another name on AMD, and are rounded
otherwise in the interpreter. Codes of floats are uint8 here, those of integers int8. The formats
are numbered as in `KV_FORMATS`.
"""

import torch
import triton
import triton.language as tl

KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
# Adding it and subtracting it again rounds to the nearest integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def decoded(codes, KV_FORMAT: tl.constexpr):
    """Return what codes stand for, before the scale, in float32."""
    if KV_FORMAT == INT8:
        return codes.to(tl.float32)
    else:
        # A float16 has all these numbers, its subnormals included, or, of those with 4 bits of
        # exponent, their 256th parts.
        sign = (codes & 0x80).to(tl.uint16) << 8
        size = (codes & 0x7F).to(tl.uint16)
        if KV_FORMAT == E4M3:
            return (sign | (size << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            return (sign | (size << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def encoded(x, KV_FORMAT: tl.constexpr):
    """Return the codes nearest to float32 numbers that are none larger than the format's own."""
    if KV_FORMAT == INT8:
        return ((x + ROUNDER) - ROUNDER).to(tl.int8)
    elif KV_FORMAT == E4M3:
        return encoded_float(x, 3, 7)
    else:
        return encoded_float(x, 2, 15)


@triton.jit
def encoded_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return uint8 codes of floats with `MANTISSA` bits of fraction."""
    CUT: tl.constexpr = 23 - MANTISSA
    SHIFT: tl.constexpr = (127 - BIAS) << 23
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + ((1 << (CUT - 1)) - 1) + ((size >> CUT) & 1) - SHIFT) >> CUT
    # Below the normal numbers the code counts steps.
    bounded = tl.minimum(size, SMALLEST_NORMAL).to(tl.float32, bitcast=True)
    steps = bounded * (1 << (BIAS - 1 + MANTISSA))
    small = ((steps + ROUNDER) - ROUNDER).to(tl.int32)
    code = tl.where(size < SMALLEST_NORMAL, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
