"""Writes a small Llama as llama.cpp's converter lays it out in a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

NUM_TOKENS = 512
#: Of our tensors and GGUF's, both without their layer.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    *,
    without: str = "",
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a Llama of 512 tokens in float32; its tokenizer knows the 256 bytes alone.

    ``without`` is a tensor to leave out, by its name in the file; ``more`` are further ones.
    """
    writer = GGUFWriter(path, "llama")
    _write_shape(writer, model.config)
    _write_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if _gguf_name(name) != without:
            writer.add_tensor(_gguf_name(name), _laid_out(name, tensor, model.config))
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(NUM_TOKENS)


def _write_tokenizer(writer: GGUFWriter) -> None:
    tokens = ["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "Ġa"]
    tokens += [f"<unused{number}>" for number in range(NUM_TOKENS - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [5] * (NUM_TOKENS - 260))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _gguf_name(name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _laid_out(
    name: str, tensor: torch.Tensor, config: transformers.PretrainedConfig
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            # llama.cpp rotates neighbours, not halves.
            halves = tensor.view(count, 2, config.head_dim // 2, -1)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.float().contiguous().numpy()
