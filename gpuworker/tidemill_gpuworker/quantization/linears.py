"""Products with quantised weights on the device that they run on."""

from collections.abc import Callable
from typing import Protocol

import torch

from tidemill_gpuworker.models.linear import Linear
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight
from tidemill_kernels import packed_weight
from tidemill_kernels.packed_weight import CodeKind, PackedWeight, row_blocks, unpack_nibbles

Multiply = Callable[[torch.Tensor, PackedWeight], torch.Tensor]

_INT8_MIDDLE = 128
_INT4_MIDDLE = 8
_CPU_GROUP_SIZES = (32, 64, 128, 256)
_CPU_ROW_UNIT = 16
#: torch's products with packed weights take time for each row of x; with more rows than this it
#: is faster to make the weight plain (measured on a Zen 4 CPU with two threads).
_FEW_INT4_ROWS = 4
_FEW_INT8_ROWS = 8


class Product(Protocol):
    """``x @ weight.T`` for a quantised weight, in x's dtype."""

    @property
    def num_bytes(self) -> int:
        """Size of what the product holds."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        ...


class PlainProduct:
    """Makes the weight plain, some rows at a time."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight
        self.num_bytes = weight.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        return packed_weight.multiply(x, self._weight)


class Int4Product:
    """For few rows torch's product with weights of 4 bits, which a CPU reads as they are.

    It has a layout of its own, so that the codes are held twice. It computes in float32 whatever x
    is: rounding scales to bfloat16 would change the weight.
    """

    def __init__(self, weight: PackedWeight) -> None:
        assert weight.zeros is not None
        scales, zeros = weight.scales.float(), weight.zeros.float()
        codes = unpack_nibbles(weight.codes).int()
        # The operator adds a zero to (code - 8) * scale, where ours is taken off the code.
        offsets = (_INT4_MIDDLE - zeros) * scales
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales = torch.stack((scales.T, offsets.T), dim=-1).contiguous()
        self._weight = weight
        self.num_bytes = weight.num_bytes + self._codes.nbytes + self._scales.nbytes

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the operator multiplies this weight."""
        return (
            weight.kind is CodeKind.INT4
            and weight.zeros is not None
            and weight.group_size in _CPU_GROUP_SIZES
            and weight.in_features % weight.group_size == 0
            and weight.out_features % _CPU_ROW_UNIT == 0
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        if len(x) > _FEW_INT4_ROWS:
            return packed_weight.multiply(x, self._weight)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.float(), self._codes, self._weight.group_size, self._scales
        )
        return y.to(x.dtype)


class Int8Product:
    """For few rows torch's product with signed bytes and a scale for each row, in float32."""

    def __init__(self, weight: PackedWeight) -> None:
        self._codes = (weight.codes.short() - _INT8_MIDDLE).to(torch.int8)
        self._scales = weight.scales.float().flatten()
        self.num_bytes = self._codes.nbytes + self._scales.nbytes

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the operator multiplies this weight."""
        return (
            weight.kind is CodeKind.INT8
            and weight.scales.shape[1] == 1
            and weight.zeros is not None
            and bool((weight.zeros == _INT8_MIDDLE).all())
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        if len(x) > _FEW_INT8_ROWS:
            return self._multiply_plain(x)
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.float(), self._codes, self._scales)
        return y.to(x.dtype)

    def _multiply_plain(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), len(self._codes))
        for start, stop in row_blocks(*self._codes.shape):
            weight = self._codes[start:stop] * self._scales[start:stop, None]
            out[:, start:stop] = x @ weight.to(x.dtype).T
        return out


class QuantizedLinear:
    """``y = x @ weight.T + bias`` for a quantised weight."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        packed = weight.packed.to(device)
        self._order = packed.order
        self._multiply = choose_product(packed)
        self._outliers = None if weight.outliers is None else weight.outliers.to(device)
        self._bias = bias
        self.num_bytes = self._multiply.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        y = self._multiply(x if self._order is None else x[:, self._order])
        if self._outliers is not None:
            y += torch.sparse.mm(self._outliers, x.float().T).T.to(y.dtype)
        if self._bias is not None:
            y += self._bias
        return y


class SideBySide:
    """Layers that share their input but not their form: their outputs beside each other."""

    def __init__(self, parts: list[Linear]) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features of all] tensor of x's dtype."""
        return torch.cat([part(x) for part in self._parts], dim=-1)


def choose_product(weight: PackedWeight) -> Product:
    """Return the fastest product with ``weight``, which is on the device it will run on."""
    if weight.codes.device.type == "cuda":
        return _gpu_product(weight)
    if Int4Product.takes(weight):
        return Int4Product(weight)
    if Int8Product.takes(weight):
        return Int8Product(weight)
    return PlainProduct(weight)


class TritonProduct:
    """Makes the weight plain in registers only."""

    def __init__(self, weight: PackedWeight, multiply: Multiply) -> None:
        self._weight = weight
        self._multiply = multiply
        self.num_bytes = weight.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        return self._multiply(x, self._weight)


def _gpu_product(weight: PackedWeight) -> Product:
    try:
        # Here because triton is optional and useless without a GPU.
        from tidemill_kernels import triton_packed
    except ImportError:
        return PlainProduct(weight)
    if triton_packed.supports(weight):
        return TritonProduct(weight, triton_packed.multiply)
    return PlainProduct(weight)
