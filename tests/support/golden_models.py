"""Small random models of every native architecture, made by transformers from its configs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 512
WINDOW = 32

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that attention is far from uniform and the best token clearly the best.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.4, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
}
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
_LLAMA4 = {
    "head_dim": 16,
    "intermediate_size": 40,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 8,
    "attn_scale": 0.4,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


#: How far float32 logits may lie from those of transformers.
ATOL = 1e-4


@dataclass(frozen=True)
class Golden:
    """One model: its family in transformers and what differs from the common sizes."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    model_class: str = ""
    #: Of a model of more than text: the config of its other part.
    vision: dict[str, Any] = field(default_factory=dict)
    #: The context to serve, where it is not the model's own.
    max_model_len: int | None = None
    #: ``ATOL``, unless transformers' own logits lie further from float64.
    atol: float = ATOL


GOLDEN: dict[str, Golden] = {
    "llama untied": Golden("Llama"),
    "llama tied, llama3 rope": Golden(
        "Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}
    ),
    "llama yarn": Golden("Llama", {"rope_parameters": _YARN}),
    "llama4": Golden("Llama4Text", _LLAMA4, model_class="Llama4ForCausalLM"),
    "llama4 plain": Golden(
        "Llama4Text",
        _LLAMA4
        | {
            "num_hidden_layers": 2,
            "no_rope_layers": [0, 1],
            "moe_layers": [1],
            "num_experts_per_tok": 1,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3,
        },
        model_class="Llama4ForCausalLM",
    ),
    "llama4 with images": Golden(
        "Llama4",
        _LLAMA4 | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        model_class="Llama4ForConditionalGeneration",
        vision={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 28,
        },
    ),
    "mistral": Golden("Mistral", {"sliding_window": WINDOW}),
    "mistral window of 3": Golden("Mistral", {"sliding_window": 3, "head_dim": 24}),
    "qwen2": Golden("Qwen2", _SLIDING | {"max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": Golden("Qwen3", _SLIDING | {"max_window_layers": 1, "head_dim": 16}),
    "smollm3": Golden("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3 sliding": Golden("SmolLM3", _SLIDING | {"no_rope_layers": [1, 0]}),
    "phi3": Golden("Phi3", {"sliding_window": WINDOW}),
    "phi3 partial": Golden(
        "Phi3",
        {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4}},
    ),
    "phi3 longrope short": Golden(
        "Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 256}
    ),
    "phi3 longrope long": Golden(
        "Phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 2},
        max_model_len=512,
        # Its rope scales attention scores by 9: transformers itself is 2e-4 from float64.
        atol=4e-4,
    ),
    "gemma": Golden("Gemma", {"head_dim": 32}),
    "gemma2": Golden(
        "Gemma2",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma2 uncapped": Golden(
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": Golden(
        "Gemma3Text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        model_class="Gemma3ForCausalLM",
    ),
    "mixtral": Golden(
        "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    ),
    "qwen2 moe": Golden(
        "Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}
    ),
    "qwen2 moe sliding": Golden(
        "Qwen2Moe",
        _MOE | _SLIDING | {"shared_expert_intermediate_size": 56, "norm_topk_prob": True},
    ),
    "qwen3 moe": Golden(
        "Qwen3Moe",
        _MOE | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3 moe sliding": Golden("Qwen3Moe", _MOE | _SLIDING | {"head_dim": 16}),
    "olmo2": Golden("Olmo2"),
    "olmo3": Golden(
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": _YARN | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": Golden(
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 3.0,
        },
    ),
    "starcoder2": Golden("Starcoder2", {"sliding_window": WINDOW}),
    "starcoder2 unbiased": Golden("Starcoder2", {"use_bias": False, "hidden_act": "gelu"}),
    "gpt oss": Golden(
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": _YARN | {"truncate": False},
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.5,
        },
    ),
}


#: Attention in chunks, which transformers' layers do not get over our cache.
NATIVE_ALONE = tuple(name for name in GOLDEN if name.startswith("llama4"))


def make_golden_model(name: str) -> transformers.PreTrainedModel:
    """Return the model of that name in ``GOLDEN``; all its parameters are random.

    Its attention is the plain one, which applies soft caps and sinks.
    """
    golden = GOLDEN[name]
    fields = _SIZES | golden.changes
    if golden.vision:
        fields = {"text_config": fields, "vision_config": golden.vision}
    config = getattr(transformers, f"{golden.family}Config")(**fields)
    config._attn_implementation = "eager"
    model_class = golden.model_class or f"{golden.family}ForCausalLM"
    torch.manual_seed(list(GOLDEN).index(name))
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("_bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def save_golden_model(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> Path:
    """Write the model to ``directory``; options are those of save_pretrained."""
    model.save_pretrained(directory, **options)
    return directory
