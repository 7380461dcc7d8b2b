"""What sets the architectures of the native path apart.

A family says where config.json keeps what the shared building blocks need, what `transformers`
takes for a field that is left out, and how the weights are called.
"""

from dataclasses import replace

from tidemill_gpuworker.loading import layer_rules
from tidemill_gpuworker.loading.model_family import Experts, Family, LayerNorms, Windows

_SANDWICH = LayerNorms(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_POST = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_QWEN_WINDOWS = Windows(
    layer_rules.from_max_window_layers, per_layer=True, switch="use_sliding_window"
)
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}
_ALL_SLIDE = Windows(layer_rules.always)
_LLAMA4 = Family(
    {
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "use_qk_norm": True,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
    unit_norm="use_qk_norm",
    mlp_name="feed_forward",
    inner_size="intermediate_size_mlp",
    has_chunks=True,
    has_rope=layer_rules.has_rope,
    interleaves_rope=True,
    tempers=True,
    experts=Experts(
        count=("num_local_experts",),
        is_sparse=layer_rules.in_moe_layers,
        inner_size="intermediate_size",
        # The weights are scores of their own.
        normalises=False,
        router="feed_forward.router",
        experts="feed_forward.experts",
        shared="feed_forward.shared_expert",
        shared_size="intermediate_size",
        kind="llama4",
    ),
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family({"max_position_embeddings": 2048}, mlp_bias="mlp_bias"),
    "Llama4ForCausalLM": _LLAMA4,
    # Its text alone: towers for images are left in the files.
    "Llama4ForConditionalGeneration": replace(
        _LLAMA4, section="text_config", prefix="language_model."
    ),
    "MistralForCausalLM": Family(
        {"max_position_embeddings": 131072, "sliding_window": 4096},
        qkv_bias=False,
        output_bias=False,
        windows=_ALL_SLIDE,
    ),
    "Qwen2ForCausalLM": Family(_QWEN, qkv_bias=True, output_bias=False, windows=_QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(_QWEN | {"head_dim": 128}, qk_norm="head", windows=_QWEN_WINDOWS),
    "SmolLM3ForCausalLM": Family(
        {
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
        },
        mlp_bias="mlp_bias",
        windows=Windows(layer_rules.has_no_rope, per_layer=True, switch="use_sliding_window"),
        has_rope=layer_rules.has_rope,
    ),
    "Phi3ForCausalLM": Family(
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
        },
        qkv_bias=False,
        output_bias=False,
        mlp="fused",
        fused_qkv=True,
        windows=_ALL_SLIDE,
        partial_rope=True,
    ),
    "GemmaForCausalLM": Family(
        _GEMMA | {"hidden_act": "gelu_pytorch_tanh"},
        norm="rms_offset",
        # Early checkpoints say "gelu" and mean its approximation.
        activations={"gelu": "gelu_pytorch_tanh"},
        scales_embedding=True,
    ),
    "Gemma2ForCausalLM": Family(
        _GEMMA
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norms=_SANDWICH,
        norm="rms_offset",
        activation="hidden_activation",
        windows=Windows(layer_rules.even, per_layer=True),
        scalars={
            "attention_soft_cap": "attn_logit_softcapping",
            "final_soft_cap": "final_logit_softcapping",
        },
        scales_embedding=True,
        query_scalar="query_pre_attn_scalar",
    ),
    "Gemma3ForCausalLM": Family(
        _GEMMA
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        norms=_SANDWICH,
        norm="rms_offset",
        qk_norm="head",
        activation="hidden_activation",
        windows=Windows(layer_rules.not_last_of_pattern, per_layer=True),
        local_theta=("rope_local_base_freq", 1e4),
        scalars={"final_soft_cap": "final_logit_softcapping"},
        scales_embedding=True,
        query_scalar="query_pre_attn_scalar",
    ),
    "MixtralForCausalLM": Family(
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        qkv_bias=False,
        output_bias=False,
        windows=_ALL_SLIDE,
        experts=Experts(
            inner_size="intermediate_size",
            normalises=True,
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        _QWEN | {"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4},
        qkv_bias="qkv_bias",
        output_bias=False,
        windows=Windows(layer_rules.even_below_max_window_layers, True, "use_sliding_window"),
        experts=Experts(shared="mlp.shared_expert"),
    ),
    "Qwen3MoeForCausalLM": Family(
        {"max_position_embeddings": 32768, "sliding_window": 4096, "num_experts_per_tok": 8},
        qk_norm="head",
        windows=Windows(layer_rules.always, switch="use_sliding_window"),
        experts=Experts(),
    ),
    "Olmo2ForCausalLM": Family(
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, norms=_POST, qk_norm="projection"
    ),
    "Olmo3ForCausalLM": Family(
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
        },
        norms=_POST,
        qk_norm="projection",
        windows=Windows(layer_rules.not_every_fourth, per_layer=True),
        local_theta=("", 5e5),
    ),
    "GraniteForCausalLM": Family(
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0},
        mlp_bias="mlp_bias",
        scalars={
            "attention_scale": "attention_multiplier",
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_divisor": "logits_scaling",
        },
    ),
    "Starcoder2ForCausalLM": Family(
        {
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        norm="layer",
        norm_eps="norm_epsilon",
        mlp="plain",
        windows=_ALL_SLIDE,
    ),
    "GptOssForCausalLM": Family(
        {
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        windows=Windows(layer_rules.even, per_layer=True),
        has_sinks=True,
        experts=Experts(inner_size="intermediate_size", router="mlp.router", kind="gpt_oss"),
    ),
}
