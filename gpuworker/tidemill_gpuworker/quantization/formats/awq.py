"""AWQ as AutoAWQ's GEMM version stores it.

``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [groups, out / 8] pack eight neighbouring
outputs into a word, interleaved; ``scales`` [groups, out].
"""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.quantization.packing import num_groups, pack_codes, unpack_words
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import PackedWeight

_BITS = 4
_PER_WORD = 8
#: Where in a word each of its eight columns is.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """Attributes: inputs of a group, 0 for all."""

    group_size: int

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        inputs, outputs = layer.in_features, layer.out_features
        layer.check_divides(_PER_WORD, outputs, "out_features")
        layer.check_divides(2, inputs, "in_features")
        size = self.group_size or inputs
        groups = num_groups(inputs, size)
        codes = _unpack(layer.read("qweight", inputs, outputs // _PER_WORD))
        zeros = _unpack(layer.read("qzeros", groups, outputs // _PER_WORD))
        kind, packed = pack_codes(codes.T, _BITS)
        scales = layer.read("scales", groups, outputs).T.contiguous()
        zeros = zeros.T.half().contiguous()
        return QuantizedWeight(PackedWeight(kind, packed.contiguous(), scales, size, zeros=zeros))


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Return uint8 [rows, 8 n] of int32 words [rows, n]."""
    nibbles = unpack_words(words, _BITS).view(len(words), -1, _PER_WORD)
    return nibbles[:, :, list(_PLACES)].flatten(1)
