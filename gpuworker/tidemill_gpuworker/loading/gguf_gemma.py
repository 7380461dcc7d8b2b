"""What a file of Gemma leaves to be told from its sizes, and transformers to a default."""

from typing import Any

#: Layers of the models of 27 billion weights, by their kind.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def scale_queries(config: Any) -> None:
    """Set the ``query_pre_attn_scalar`` of a Gemma 2 or 3; leave other models as they are.

    It is the width of a head, but of the 27B models the hidden size shared out among the heads.
    Source: llama.cpp's ``f_attention_scale``, which goes by the number of layers too.
    """
    layers = _LAYERS_OF_27B.get(config.model_type)
    if layers is None:
        return
    share = config.hidden_size // config.num_attention_heads
    is_27b = config.num_hidden_layers == layers
    config.query_pre_attn_scalar = share if is_27b else config.head_dim
