"""What sets the architectures of the native path apart, as data.

A family says where config.json keeps what the shared building blocks need, what `transformers`
takes for a field that is left out, and how the weights are called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill_gpuworker.config_fields import ConfigFields

#: Whether something holds for the layer of that index.
LayerRule = Callable[[ConfigFields, int], bool]


def _never(config: ConfigFields, index: int) -> bool:
    return False


def _always(config: ConfigFields, index: int) -> bool:
    return True


def _even(config: ConfigFields, index: int) -> bool:
    return index % 2 == 0


def _not_every_fourth(config: ConfigFields, index: int) -> bool:
    return (index + 1) % 4 != 0


def _from_max_window_layers(config: ConfigFields, index: int) -> bool:
    return index >= config.count("max_window_layers")


def _even_below_max_window_layers(config: ConfigFields, index: int) -> bool:
    return index % 2 == 0 and index < config.count("max_window_layers")


def _not_last_of_pattern(config: ConfigFields, index: int) -> bool:
    name = "sliding_window_pattern"
    return (index + 1) % config.size(name, default=config.size(f"_{name}", default=6)) != 0


def _has_rope(config: ConfigFields, index: int) -> bool:
    listed = config.counts("no_rope_layers")
    if not listed:
        return (index + 1) % config.size("no_rope_layer_interval") != 0
    if index >= len(listed):
        raise config.damaged(f"no_rope_layers has {len(listed)} entries, fewer than layers")
    return bool(listed[index])


def _has_no_rope(config: ConfigFields, index: int) -> bool:
    return not _has_rope(config, index)


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers attend to the last `sliding_window` tokens alone.

    Attributes:
        rule: the layers that do where `layer_types` is absent.
        per_layer: whether `layer_types` is heeded.
        switch: a field that must be true for any of it; "" if there is none.
    """

    rule: LayerRule = _never
    per_layer: bool = False
    switch: str = ""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms, before and after its two blocks; "" where there is none."""

    attention_in: str = "input_layernorm"
    attention_out: str = ""
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = ""


_SANDWICH = LayerNorms(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_POST = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Experts:
    """How a family's sparse layers are configured and called.

    Attributes:
        count: fields with the number of experts, the first one present counts.
        inner_size: the field with an expert's inner size.
        normalises: whether the weights of the chosen experts are made to add up to 1; a string
            is the field that says so.
        router, experts, projections: names of the weights, the last as gate, up and down.
        shared: the expert that every token takes, with a gate of its own; "" for none.
        kind: "linear" experts, or those of "gpt_oss": all in one tensor, clamped, with biases.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    inner_size: str = "moe_intermediate_size"
    normalises: bool | str = "norm_topk_prob"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = ""
    kind: str = "linear"


@dataclass(frozen=True, slots=True)
class Family:
    """Where an architecture departs from Llama.

    Attributes:
        defaults: what `transformers` takes for fields that are left out.
        qkv_bias, output_bias, mlp_bias: whether the layers have one; a string is the field that
            says so.
        norms: the norms of a layer.
        norm: "rms", "rms_offset" (weights are stored less 1) or "layer".
        norm_eps: the field with its epsilon.
        qk_norm: norms of queries and keys: "", "head" (each head) or "projection" (all at once).
        activation: the field that names it.
        activations: what the names in that field really mean.
        mlp: "gated", "fused" (gate and up in one tensor) or "plain" (no gate).
        fused_qkv: whether queries, keys and values come in one tensor.
        windows: which layers slide.
        has_rope: which layers rotate queries and keys.
        partial_rope: whether only a part of each head may be rotated.
        local_theta: for families whose sliding layers have a rotary embedding of their own, the
            field of older configs with its base frequency and that frequency's default.
        scalars: attributes of `ModelConfig` and the fields they are in.
        scales_embedding: whether embeddings are multiplied by the root of the hidden size.
        query_scalar: the field whose inverse root scales attention scores; "" for head_dim.
        has_sinks: whether each head has an attention sink.
        experts: the sparse layers, if there are any.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    norms: LayerNorms = LayerNorms()
    norm: str = "rms"
    norm_eps: str = "rms_norm_eps"
    qk_norm: str = ""
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    mlp: str = "gated"
    fused_qkv: bool = False
    windows: Windows = Windows()
    has_rope: LayerRule = _always
    partial_rope: bool = False
    local_theta: tuple[str, float] | None = None
    scalars: Mapping[str, str] = field(default_factory=dict)
    scales_embedding: bool = False
    query_scalar: str = ""
    has_sinks: bool = False
    experts: Experts | None = None


_QWEN_WINDOWS = Windows(_from_max_window_layers, per_layer=True, switch="use_sliding_window")
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_ALL_SLIDE = Windows(_always)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        {"sliding_window": 4096}, qkv_bias=False, output_bias=False, windows=_ALL_SLIDE
    ),
    "Qwen2ForCausalLM": Family(_QWEN, qkv_bias=True, output_bias=False, windows=_QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(_QWEN | {"head_dim": 128}, qk_norm="head", windows=_QWEN_WINDOWS),
    "SmolLM3ForCausalLM": Family(
        {"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        mlp_bias="mlp_bias",
        windows=Windows(_has_no_rope, per_layer=True, switch="use_sliding_window"),
        has_rope=_has_rope,
    ),
    "Phi3ForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
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
        windows=Windows(_even, per_layer=True),
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
        },
        norms=_SANDWICH,
        norm="rms_offset",
        qk_norm="head",
        activation="hidden_activation",
        windows=Windows(_not_last_of_pattern, per_layer=True),
        local_theta=("rope_local_base_freq", 1e4),
        scalars={"final_soft_cap": "final_logit_softcapping"},
        scales_embedding=True,
        query_scalar="query_pre_attn_scalar",
    ),
    "MixtralForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
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
        windows=Windows(_even_below_max_window_layers, True, "use_sliding_window"),
        experts=Experts(shared="mlp.shared_expert"),
    ),
    "Qwen3MoeForCausalLM": Family(
        {"sliding_window": 4096, "num_experts_per_tok": 8},
        qk_norm="head",
        windows=Windows(_always, switch="use_sliding_window"),
        experts=Experts(),
    ),
    "Olmo2ForCausalLM": Family({"rms_norm_eps": 1e-5}, norms=_POST, qk_norm="projection"),
    "Olmo3ForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        norms=_POST,
        qk_norm="projection",
        windows=Windows(_not_every_fourth, per_layer=True),
        local_theta=("", 5e5),
    ),
    "GraniteForCausalLM": Family(
        {"attention_multiplier": 1.0},
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
        windows=Windows(_even, per_layer=True),
        has_sinks=True,
        experts=Experts(inner_size="intermediate_size", router="mlp.router", kind="gpt_oss"),
    ),
}
