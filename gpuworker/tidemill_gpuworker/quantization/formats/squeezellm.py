"""SqueezeLLM: a table of 16 values for each output, and outliers beside it.

``qweight`` int32 [in / 8, out] packs indices along the inputs; ``lookup_table`` [out, 16];
``rows`` int32 [out + 1], ``cols`` and ``vals`` are a sparse matrix that is added (CSR).
"""

from dataclasses import dataclass

import torch

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.quantization.packing import unpack_words
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import CodeKind, PackedWeight, pack_nibbles

_BITS = 4
_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class SqueezeLlmFormat:
    """Tables of 16 values; those of 8 are refused by name."""

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight; raises as the protocol says."""
        if layer.has("full_rows"):
            raise UnsupportedModel(
                f"{layer.name}: SqueezeLLM with whole rows kept (full_rows) is not supported",
                fix="Use a model that was packed without topX.",
            )
        inputs, outputs = layer.in_features, layer.out_features
        layer.check_divides(_PER_WORD, inputs, "in_features")
        words = layer.read("qweight", inputs // _PER_WORD, outputs)
        codes = pack_nibbles(unpack_words(words.T, _BITS))
        table = layer.read("lookup_table", outputs, 1 << _BITS).float()
        ones = torch.ones(outputs, 1)
        packed = PackedWeight(CodeKind.TABLE4, codes.contiguous(), ones, inputs, table=table)
        return QuantizedWeight(packed, _outliers(layer))


def _outliers(layer: StoredLayer) -> torch.Tensor | None:
    layer.skip("startrows")
    if not layer.has("rows"):
        return None
    ends = layer.read("rows", layer.out_features + 1).long()
    columns, values = layer.read_any("cols").long(), layer.read_any("vals").float()
    counts = ends.diff()
    counted = int(counts.sum()) if bool((counts >= 0).all()) else -1
    in_range = bool(((columns >= 0) & (columns < layer.in_features)).all())
    if counted != len(columns) or counted != len(values) or not in_range:
        raise layer.damaged("rows, cols and vals are no sparse matrix")
    rows = torch.arange(layer.out_features).repeat_interleave(counts)
    shape = (layer.out_features, layer.in_features)
    return torch.sparse_coo_tensor(
        torch.stack((rows, columns)), values, shape, check_invariants=False
    ).coalesce()
