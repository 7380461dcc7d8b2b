"""Tensors of a GGUF file that transformers' reader would drop without a word."""

from collections.abc import Collection
from typing import Any

#: Read by gguf_rope.
_OF_ROPE = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
#: Frequencies that old converters wrote for each layer; the settings of rope say the same.
_REPEATED = ".attn_rot_embd.weight"
_WEIGHT = ".weight"


def known_tensors(model: Any, architecture: str) -> Collection[str] | None:
    """Return the names in a file that transformers' older reader has a place for in ``model``.

    They end as the names of its parameters do: those of experts have no ``.weight``.
    None where the newer reader loads ``architecture``, which itself reports what is left over.
    """
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    if is_gguf_arch_supported(architecture):
        return None
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    return names.keys()


def unused_tensors(names: Collection[str], known: Collection[str]) -> list[str]:
    """Return those of ``names`` that are neither ``known`` nor of no weight for the tokens."""
    return sorted(
        name
        for name in names
        if name not in known
        and name.removesuffix(_WEIGHT) not in known
        and name not in _OF_ROPE
        and not name.endswith(_REPEATED)
    )
