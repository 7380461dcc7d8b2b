"""Integers of 4 or 8 bits as compressed-tensors packs them.

``weight_packed`` int32 [out, in * bits / 32] packs codes along the inputs, moved up by half their
range; ``weight_scale`` [out, groups]; ``weight_zero_point`` int32 [out * bits / 32, groups] packs
zeros along the outputs, moved up as well; ``weight_g_idx`` int32 [in].
"""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.quantization.grouping import inputs_by_group
from tidemill_gpuworker.quantization.packing import (
    constant_zeros,
    num_groups,
    pack_codes,
    unpack_words,
)
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class PackQuantizedFormat:
    """Attributes: bits 4 or 8; inputs of a group, 0 for all; whether there are zeros."""

    bits: int
    group_size: int
    symmetric: bool = True

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        inputs, outputs, per_word = layer.in_features, layer.out_features, 32 // self.bits
        layer.check_divides(per_word, inputs, "in_features")
        size = self.group_size or inputs
        groups = num_groups(inputs, size)
        layer.skip("weight_shape")
        codes = unpack_words(layer.read("weight_packed", outputs, inputs // per_word), self.bits)
        scales = layer.read("weight_scale", outputs, groups)
        zeros = constant_zeros(scales, self.bits)
        if not self.symmetric:
            zeros = self._zeros(layer, groups)
        order = _order(layer, size)
        kind, packed = pack_codes(codes if order is None else codes[:, order], self.bits)
        weight = PackedWeight(kind, packed.contiguous(), scales, size, zeros=zeros, order=order)
        return QuantizedWeight(weight)

    def _zeros(self, layer: StoredLayer, groups: int) -> torch.Tensor:
        per_word = 32 // self.bits
        words = layer.read("weight_zero_point", num_groups(layer.out_features, per_word), groups)
        return unpack_words(words.T, self.bits).T[: layer.out_features].half().contiguous()


def _order(layer: StoredLayer, size: int) -> torch.Tensor | None:
    if not layer.has("weight_g_idx"):
        return None
    group_of = layer.read("weight_g_idx", layer.in_features).long()
    # What a writer leaves in a tensor that it does not use.
    return None if bool((group_of == -1).all()) else inputs_by_group(layer, group_of, size)
