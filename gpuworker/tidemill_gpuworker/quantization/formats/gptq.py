"""GPTQ as AutoGPTQ and GPTQModel store it.

``qweight`` int32 [in * bits / 32, out] packs codes along the inputs; ``qzeros`` int32
[groups, out * bits / 32] packs zeros along the outputs, in version 1 less one; ``scales``
[groups, out]; ``g_idx`` int32 [in] is the group of each input.
"""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.quantization.grouping import inputs_by_group
from tidemill_gpuworker.quantization.packing import num_groups, pack_codes, unpack_words
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """Attributes: bits 2, 4 or 8; inputs of a group, 0 for all; whether zeros are stored less 1."""

    bits: int
    group_size: int
    zeros_less_one: bool = True

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        inputs, outputs, per_word = layer.in_features, layer.out_features, 32 // self.bits
        layer.check_divides(per_word, inputs, "in_features")
        layer.check_divides(per_word, outputs, "out_features")
        size = self.group_size or inputs
        groups = num_groups(inputs, size)
        words = layer.read("qweight", inputs // per_word, outputs)
        zeros = unpack_words(layer.read("qzeros", groups, outputs // per_word), self.bits)
        codes = unpack_words(words.T, self.bits)
        order = self._order(layer, size)
        kind, packed = pack_codes(codes if order is None else codes[:, order], self.bits)
        return QuantizedWeight(
            PackedWeight(
                kind,
                packed.contiguous(),
                layer.read("scales", groups, outputs).T.contiguous(),
                size,
                zeros=(zeros.T.half() + self.zeros_less_one).contiguous(),
                order=order,
            )
        )

    def _order(self, layer: StoredLayer, size: int) -> torch.Tensor | None:
        if not layer.has("g_idx"):
            return None
        return inputs_by_group(layer, layer.read("g_idx", layer.in_features).long(), size)
