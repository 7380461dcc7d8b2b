"""Weights of signed bytes with a scale for each row, or one for all.

bitsandbytes (LLM.int8) calls the row's largest value ``SCB``, which the code 127 stands for;
compressed-tensors has ``weight_scale``. Activations are kept in the model's dtype.
"""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.quantization.formats.fp8 import row_scales
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import CodeKind, PackedWeight

_MIDDLE = 128


@dataclass(frozen=True, slots=True)
class Int8Format:
    """Attributes: the tensor of scales, and what they are divided by."""

    scale: str = "weight_scale"
    divisor: float = 1.0

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        weight = layer.read("weight", layer.out_features, layer.in_features)
        if weight.dtype != torch.int8:
            raise layer.damaged(f"the weight is {weight.dtype}, not int8")
        layer.skip("weight_format", "input_scale", "input_zero_point", "k_scale", "v_scale")
        scales = row_scales(layer, self.scale) / self.divisor
        codes = (weight.short() + _MIDDLE).to(torch.uint8)
        zeros = torch.full_like(scales, _MIDDLE, dtype=torch.float16)
        if layer.has("weight_zero_point"):
            zeros += row_scales(layer, "weight_zero_point").half()
        packed = PackedWeight(CodeKind.INT8, codes, scales, layer.in_features, zeros=zeros)
        return QuantizedWeight(packed)
