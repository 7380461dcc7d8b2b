"""Small random models in Hugging Face directories, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 512
MAX_POSITIONS = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    # Wide enough that attention is far from uniform and the best token clearly the best.
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": _LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", {"attention_bias": True}),
}


def make_tiny_model(name: str) -> transformers.PreTrainedModel:
    """Return the model of that name in ``CONFIGS``; all parameters, norms and biases are random."""
    family, changes = CONFIGS[name]
    torch.manual_seed(sorted(CONFIGS).index(name))
    config = getattr(transformers, f"{family}Config")(**_SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def save_tiny_model(name: str, directory: Path, **options: Any) -> Path:
    """Write the model of that name to ``directory``; options are those of save_pretrained."""
    make_tiny_model(name).save_pretrained(directory, **options)
    return directory
