"""Products with quantised weights on the device that they run on."""

from collections.abc import Callable
from functools import partial

import torch

from tidemill_gpuworker.linear import Linear
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight
from tidemill_kernels import packed_weight
from tidemill_kernels.packed_weight import CodeKind, PackedWeight, unpack_nibbles

Product = Callable[[torch.Tensor], torch.Tensor]

_INT8_MIDDLE = 128
_INT4_MIDDLE = 8
_CPU_GROUP_SIZES = (32, 64, 128, 256)
_CPU_ROW_UNIT = 16


class Int4Product:
    """torch's product with weights of 4 bits, which a CPU reads as they are.

    It computes in float32 whatever x is: rounding scales to bfloat16 would change the weight.
    """

    def __init__(self, weight: PackedWeight) -> None:
        assert weight.zeros is not None
        scales, zeros = weight.scales.float(), weight.zeros.float()
        codes = unpack_nibbles(weight.codes).int()
        # The operator adds a zero to (code - 8) * scale, where ours is taken off the code.
        offsets = (_INT4_MIDDLE - zeros) * scales
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales = torch.stack((scales.T, offsets.T), dim=-1).contiguous()
        self._group_size = weight.group_size

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
        """Return [rows, out_features] in x's dtype."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.float(), self._codes, self._group_size, self._scales
        )
        return y.to(x.dtype)


class Int8Product:
    """torch's product with signed bytes and a scale for each row, in float32 as above."""

    def __init__(self, weight: PackedWeight) -> None:
        self._codes = (weight.codes.short() - _INT8_MIDDLE).to(torch.int8)
        self._scales = weight.scales.float().flatten()

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
        """Return [rows, out_features] in x's dtype."""
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.float(), self._codes, self._scales)
        return y.to(x.dtype)


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
    return partial(packed_weight.multiply, weight=weight)


def _gpu_product(weight: PackedWeight) -> Product:
    try:
        # Here because triton is optional and useless without a GPU.
        from tidemill_kernels import triton_packed
    except ImportError:
        return partial(packed_weight.multiply, weight=weight)
    if triton_packed.supports(weight):
        return partial(triton_packed.multiply, weight=weight)
    return partial(packed_weight.multiply, weight=weight)
