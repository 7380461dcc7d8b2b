"""Small random models of architectures that only the transformers backend runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from support.golden_models import VOCAB_SIZE, WINDOW

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
#: Of configs that call the common sizes by names of their own.
_GPT = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """One model: its class in transformers and what differs from the common sizes."""

    model_class: str
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)


CASES: dict[str, Case] = {
    "opt": Case("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt projected": Case("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "gpt2": Case("GPT2LMHeadModel", sizes=_GPT),
    "gpt neox": Case("GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "gpt neox in a row": Case("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "phi": Case("PhiForCausalLM", {"qk_layernorm": True}),
    "stablelm": Case("StableLmForCausalLM", {"use_qkv_bias": True}),
    "cohere": Case("CohereForCausalLM", {"logit_scale": 0.5}),
    "cohere2": Case("Cohere2ForCausalLM", _SLIDING_FULL | {"logit_scale": 0.5}),
    "glm": Case("GlmForCausalLM", {"head_dim": 16}),
    "glm4": Case("Glm4ForCausalLM", {"head_dim": 16}),
    "granite moe": Case("GraniteMoeForCausalLM", _MOE | {"attention_multiplier": 0.3}),
    "olmo": Case("OlmoForCausalLM", {"clip_qkv": 2.0}),
    "olmoe": Case("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": Case("NemotronForCausalLM"),
    "persimmon": Case("PersimmonForCausalLM"),
    "gpt bigcode": Case("GPTBigCodeForCausalLM", {"multi_query": True}, _GPT),
    "helium": Case("HeliumForCausalLM", {"head_dim": 16}),
    "ernie 4.5": Case("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "exaone4": Case(
        "Exaone4ForCausalLM", _SLIDING_FULL | {"sliding_window_pattern": 2, "head_dim": 16}
    ),
    "deepseek v2": Case("DeepseekV2ForCausalLM", _MLA),
    "deepseek v3": Case("DeepseekV3ForCausalLM", _MLA),
    "vaultgemma": Case(
        "VaultGemmaForCausalLM",
        _SLIDING_FULL
        | {"head_dim": 16, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 24},
    ),
    "phimoe": Case("PhimoeForCausalLM", _MOE | {"sliding_window": WINDOW}),
    "seed oss": Case("SeedOssForCausalLM", {"head_dim": 16}),
    "apertus": Case("ApertusForCausalLM"),
    "arcee": Case("ArceeForCausalLM"),
    "glm4 moe": Case("Glm4MoeForCausalLM", _MLA | {"num_key_value_heads": 2, "head_dim": 16}),
    "ministral": Case("MinistralForCausalLM", _SLIDING_FULL | {"head_dim": 16}),
    "codegen": Case("CodeGenForCausalLM", {"rotary_dim": 8}, _GPT),
    "gptj": Case("GPTJForCausalLM", {"rotary_dim": 8}, _GPT),
    "biogpt": Case("BioGptForCausalLM"),
    "bitnet": Case("BitNetForCausalLM"),
    "minimax m2": Case("MiniMaxM2ForCausalLM", _MOE | {"head_dim": 16}),
    "hunyuan dense": Case("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "cwm": Case("CwmForCausalLM", _SLIDING_FULL | {"head_dim": 16}),
}
#: Models that cannot run over a paged cache, and what their refusal names.
REFUSED: dict[str, tuple[Case, str]] = {
    "bloom": (Case("BloomForCausalLM", sizes=_GPT), "attention interface"),
    "falcon": (Case("FalconForCausalLM"), "attention interface"),
    "mpt": (Case("MptForCausalLM"), "attention interface"),
    "doge": (Case("DogeForCausalLM"), "adds something to its attention mask"),
    "llama4 in chunks": (
        Case("Llama4ForCausalLM", {"head_dim": 16, "attention_chunk_size": WINDOW}),
        "type chunked_attention",
    ),
    "llama4 tempered": (
        Case("Llama4ForCausalLM", {"head_dim": 16, "attention_chunk_size": None}),
        "attn_temperature_tuning",
    ),
    "gemma4": (
        Case(
            "Gemma4ForCausalLM",
            {
                "head_dim": 16,
                "global_head_dim": 32,
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 8,
            },
        ),
        "differ in the number or width of heads",
    ),
    "lfm2": (
        Case("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        "layers of type conv",
    ),
    "mamba": (Case("MambaForCausalLM"), "layers of type linear_attention"),
    "falcon h1": (Case("FalconH1ForCausalLM"), "layers of type hybrid"),
    "rwkv": (Case("RwkvForCausalLM"), "recurrent state"),
    "qwen3 next": (
        Case("Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
        "layers of type linear_attention",
    ),
    "bert": (Case("BertLMHeadModel"), "neither causal nor a sliding window"),
    "persimmon dynamic": (
        Case(
            "PersimmonForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ),
        "dynamic",
    ),
}


def make_config(case: Case) -> transformers.PretrainedConfig:
    """Return the config of a case."""
    model_class = getattr(transformers, case.model_class)
    config: transformers.PretrainedConfig = model_class.config_class(**case.sizes | case.changes)
    config.architectures = [case.model_class]
    return config


def make_case(case: Case) -> transformers.PreTrainedModel:
    """Return the model; all its parameters are random, its attention is its own."""
    config = make_config(case)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model: transformers.PreTrainedModel = getattr(transformers, case.model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def save_case(case: Case, directory: Path) -> transformers.PreTrainedModel:
    """Write the model to ``directory`` and return it."""
    model = make_case(case)
    model.save_pretrained(directory)
    return model
