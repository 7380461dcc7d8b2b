"""Quantises plain weights while they are loaded: round to nearest, no data needed."""

from dataclasses import dataclass
from typing import Literal

import torch

from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight
from tidemill_kernels.packed_weight import CodeKind, PackedWeight, pack_nibbles

OnTheFlyMethod = Literal["fp8", "int8", "int4"]
ON_THE_FLY: tuple[OnTheFlyMethod, ...] = ("fp8", "int8", "int4")

_FP8_MAX = 448.0
_INT8_MAX = 127.0
_INT8_MIDDLE = 128
_INT4_MAX = 15
#: The first that divides the inputs, so that the CPU's own product takes the weight.
_GROUP_SIZES = (128, 64, 32)
#: Keeps scales of rows that are all zero from being zero.
_LEAST_SCALE = 1e-12
#: Routers choose experts; a wrong choice costs more than their few weights save.
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class OnTheFly:
    """Quantises the layers of a plain checkpoint.

    ``fp8`` and ``int8`` have a scale for each output, ``int4`` scale and zero for each 128 inputs
    of an output (64 or 32 where those divide the inputs better).
    """

    method: OnTheFlyMethod

    def takes(self, name: str) -> bool:
        """Whether the layer of that name is quantised."""
        return name.rpartition(".")[2] not in _ROUTERS

    def quantise(self, weight: torch.Tensor) -> QuantizedWeight:
        """Return the nearest quantised weight to ``weight`` [out, in], on the same device."""
        if self.method == "int4" and weight.shape[1] % 2 == 0:
            return QuantizedWeight(_int4(weight.float()))
        if self.method == "fp8":
            return QuantizedWeight(_fp8(weight.float()))
        return QuantizedWeight(_int8(weight.float()))


def _row_scales(weight: torch.Tensor, largest: float) -> torch.Tensor:
    return (weight.abs().amax(dim=1, keepdim=True) / largest).clamp_(min=_LEAST_SCALE)


def _fp8(weight: torch.Tensor) -> PackedWeight:
    scales = _row_scales(weight, _FP8_MAX)
    codes = (weight / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return PackedWeight(CodeKind.FP8, codes.view(torch.uint8), scales, weight.shape[1])


def _int8(weight: torch.Tensor) -> PackedWeight:
    scales = _row_scales(weight, _INT8_MAX)
    codes = (weight / scales).round_().add_(_INT8_MIDDLE).to(torch.uint8)
    zeros = torch.full_like(scales, _INT8_MIDDLE, dtype=torch.float16)
    return PackedWeight(CodeKind.INT8, codes, scales, weight.shape[1], zeros=zeros)


def _int4(weight: torch.Tensor) -> PackedWeight:
    rows, columns = weight.shape
    size = next((size for size in _GROUP_SIZES if columns % size == 0), _GROUP_SIZES[0])
    padding = -columns % size
    grouped = torch.nn.functional.pad(weight, (0, padding)).view(rows, -1, size)
    high, low = grouped.amax(dim=2).clamp_(min=0), grouped.amin(dim=2).clamp_(max=0)
    scales = ((high - low) / _INT4_MAX).clamp_(min=_LEAST_SCALE)
    zeros = (-low / scales).round_().clamp_(0, _INT4_MAX)
    codes = (grouped / scales[:, :, None] + zeros[:, :, None]).round_().clamp_(0, _INT4_MAX)
    packed = pack_nibbles(codes.view(rows, -1)[:, :columns].to(torch.uint8))
    return PackedWeight(CodeKind.INT4, packed, scales, size, zeros=zeros.half())
