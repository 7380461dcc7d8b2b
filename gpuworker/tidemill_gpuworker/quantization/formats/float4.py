"""Four-bit floats: NVFP4 and MXFP4 of compressed-tensors, nf4 and fp4 of bitsandbytes."""

import json
from dataclasses import dataclass

import torch

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import CodeKind, PackedWeight

#: float4_e2m1fn, the positive half first (OCP Microscaling Formats 1.0).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


def _e2m1_table() -> torch.Tensor:
    return torch.tensor([[*_E2M1, *(-value for value in _E2M1)]])


@dataclass(frozen=True, slots=True)
class Float4Format:
    """``weight_packed`` uint8 [out, in / 2], the first code in the lower half.

    Attributes:
        group_size: columns that share a scale: 16 with scales in fp8 over a global one (NVFP4),
            32 with powers of two (MXFP4).
    """

    group_size: int

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        size = self.group_size
        layer.check_divides(size, layer.in_features, "in_features")
        codes = layer.read("weight_packed", layer.out_features, layer.in_features // 2)
        stored = layer.read("weight_scale", layer.out_features, layer.in_features // size)
        layer.skip("input_global_scale")
        if layer.has("weight_global_scale"):
            scales = stored.float() / layer.read("weight_global_scale", 1)
        else:
            scales = torch.exp2(stored.view(torch.uint8).float() - _E8M0_BIAS)
        packed = PackedWeight(CodeKind.TABLE4, codes, scales, size, table=_e2m1_table())
        return QuantizedWeight(packed)


@dataclass(frozen=True, slots=True)
class BitsAndBytes4Format:
    """``weight`` uint8 [out * in / 2, 1], the first code in the upper half of a byte.

    ``weight.absmax`` has a scale for each block of codes, or bytes that index
    ``weight.nested_quant_map``; ``weight.quant_map`` the 16 values.
    """

    kind: str = "nf4"

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        outputs, inputs = layer.out_features, layer.in_features
        state = self._state(layer)
        size = int(state["blocksize"])
        if inputs % size:
            raise UnsupportedModel(
                f"{layer.name}: blocks of {size} do not divide its {inputs} inputs",
                fix="Use a model whose rows hold whole blocks.",
            )
        packed = layer.read("weight", outputs * inputs // 2, 1).view(outputs, inputs // 2)
        codes = (packed << 4) | (packed >> 4)
        scales = _absmax(layer, state).view(outputs, inputs // size)
        table = layer.read("weight.quant_map", 16).float().view(1, 16)
        weight = PackedWeight(CodeKind.TABLE4, codes, scales.contiguous(), size, table=table)
        return QuantizedWeight(weight)

    def _state(self, layer: StoredLayer) -> dict[str, float]:
        raw = layer.read_any(f"weight.quant_state.bitsandbytes__{self.kind}")
        try:
            state = json.loads(bytes(raw.tolist()))
            return {key: state[key] for key in _NUMBERS if key in state}
        except (ValueError, TypeError) as error:
            raise layer.damaged(f"quant_state is not JSON: {error}") from error


_NUMBERS = ("blocksize", "nested_blocksize", "nested_offset")


def _absmax(layer: StoredLayer, state: dict[str, float]) -> torch.Tensor:
    count = layer.out_features * layer.in_features // int(state["blocksize"])
    absmax = layer.read("weight.absmax", count)
    if absmax.dtype != torch.uint8:
        return absmax.float()
    values = layer.read("weight.nested_quant_map", 256).float()[absmax.long()]
    nested = layer.read_any("weight.nested_absmax").float()
    per_code = nested.repeat_interleave(int(state["nested_blocksize"]))[:count]
    return values * per_code + state["nested_offset"]
