"""fp8 weights with one scale for all, for each row or for each block.

``weight`` float8_e4m3fn [out, in]; its scales are multiplied with it, whether they are called
``weight_scale`` or ``weight_scale_inv``. Scales of activations are not used: activations are kept
in the model's dtype, which loses less.
"""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.quantization.packing import num_groups
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import CodeKind, PackedWeight

_UNUSED = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Attributes: rows and columns of a block, None for a scale of each row or of the tensor."""

    block: tuple[int, int] | None = None

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        weight = layer.read("weight", layer.out_features, layer.in_features)
        if weight.dtype != torch.float8_e4m3fn:
            raise layer.damaged(f"the weight is {weight.dtype}, not float8_e4m3fn")
        layer.skip(*_UNUSED)
        suffix = "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"
        if self.block is None:
            scales = row_scales(layer, suffix)
            size = layer.in_features
        else:
            scales, size = _block_scales(layer, suffix, self.block), self.block[1]
        codes = weight.view(torch.uint8)
        return QuantizedWeight(PackedWeight(CodeKind.FP8, codes, scales, size))


def row_scales(layer: StoredLayer, suffix: str) -> torch.Tensor:
    """Return scales [out, 1] of a tensor that holds one for all or one for each row."""
    scales = layer.read_any(suffix)
    if scales.numel() not in (1, layer.out_features):
        raise layer.damaged(
            f"{suffix} has {scales.numel()} scales for {layer.out_features} outputs"
        )
    return scales.reshape(-1, 1).float().expand(layer.out_features, 1).contiguous()


def _block_scales(layer: StoredLayer, suffix: str, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = block
    shape = num_groups(layer.out_features, rows), num_groups(layer.in_features, columns)
    scales = layer.read(suffix, *shape).float()
    return scales.repeat_interleave(rows, dim=0)[: layer.out_features].contiguous()
