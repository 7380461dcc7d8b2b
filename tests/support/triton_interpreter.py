"""Correct the Triton interpreter where it computes other things than a GPU.

It keeps bfloat16 as bare 16-bit integers, so that products of such blocks are silently wrong,
and it cuts float32 to bfloat16 instead of rounding. Comparisons keep their operands' dtype, which
breaks masks made of scalar comparisons. Triton 3.6 also lacks bfloat16 constants and loop bounds
under numpy 2.4. `install` replaces those operations by right ones, on triton 3.6 to 3.9; call it
before the first launch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"}
_Handle = interpreter.TensorHandle


def install() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "tidemill_corrected", False):
        return
    builder.tidemill_corrected = True
    builder.create_dot = _with_wide_operands(builder.create_dot)
    builder.binary_op = _with_right_dtypes(builder.binary_op)
    builder.unary_op = _in_float32(builder.unary_op)
    builder.cast_impl = _rounding(builder.cast_impl)
    builder.create_fp_to_fp = _rounding(builder.create_fp_to_fp)
    builder.get_bf16 = lambda self, value: _narrow(np.array([value], np.float32))
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _wide(handle: Any) -> Any:
    if not _is_bfloat16(handle):
        return handle
    return _Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(values: Any) -> Any:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest_even = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    quiet_nan = np.uint32(0x7FC0)
    return _Handle(
        np.where(np.isnan(values), quiet_nan, nearest_even).astype(np.uint16), tl.bfloat16
    )


def _with_wide_operands(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    def corrected(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _wide(a), _wide(b), *rest)

    return corrected


def _with_right_dtypes(binary_op: Callable[..., Any]) -> Callable[..., Any]:
    def corrected(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        arithmetic = _is_bfloat16(lhs) and op.__name__ not in _BITWISE
        if arithmetic:
            lhs, rhs = _wide(lhs), _wide(rhs)
        result = binary_op(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            return _Handle(result.data, tl.int1)
        return _narrow(result.data) if arithmetic else result

    return corrected


def _in_float32(unary_op: Callable[..., Any]) -> Callable[..., Any]:
    def corrected(self: Any, arg: Any, op: Any) -> Any:
        result = unary_op(self, _wide(arg), op)
        return _narrow(result.data) if _is_bfloat16(arg) else result

    return corrected


def _rounding(cast: Callable[..., Any]) -> Callable[..., Any]:
    def corrected(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return _narrow(source.data)
        if target.scalar == tl.float32 and _is_bfloat16(source):
            return _wide(source)
        return cast(self, source, target, *rest)

    return corrected


def _with_index(patch: Callable[..., Any]) -> Callable[..., Any]:
    def index(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def corrected(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        if scope:
            scope[-1].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    return corrected
