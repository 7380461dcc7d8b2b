"""How the architectures of the native path are told apart, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill_gpuworker.loading.layer_rules import LayerRule, always, never, sparse_step


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers attend to the last `sliding_window` tokens alone.

    Attributes:
        rule: the layers that do where `layer_types` is absent.
        per_layer: whether `layer_types` is heeded.
        switch: a field that must be true for any of it; "" if there is none.
    """

    rule: LayerRule = never
    per_layer: bool = False
    switch: str = ""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms, before and after its two blocks; "" where there is none."""

    attention_in: str = "input_layernorm"
    attention_out: str = ""
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = ""


@dataclass(frozen=True, slots=True)
class Experts:
    """How a family's sparse layers are configured and called.

    Attributes:
        count: fields with the number of experts, the first one present counts.
        is_sparse: the layers that have them.
        inner_size: the field with an expert's inner size.
        normalises: whether the weights of the chosen experts are made to add up to 1; a string
            is the field that says so.
        router, experts, projections: names of the weights, the last as gate, up and down.
        shared: the expert that every token takes, with a gate of its own; "" for none.
        shared_size: the field with its inner size.
        kind: "linear" experts, or those of "gpt_oss" (in one tensor, clamped, with biases) or of
            "llama4" (in one tensor, their inputs weighted, no gate for the shared one).
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    is_sparse: LayerRule = sparse_step
    inner_size: str = "moe_intermediate_size"
    normalises: bool | str = "norm_topk_prob"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = ""
    shared_size: str = "shared_expert_intermediate_size"
    kind: str = "linear"


@dataclass(frozen=True, slots=True)
class Family:
    """Where an architecture departs from Llama.

    Attributes:
        defaults: what `transformers` takes for fields that are left out.
        section: the object of config.json that these fields are in; "" for config.json itself.
        prefix: what the names of the decoder's tensors begin with.
        qkv_bias, output_bias, mlp_bias: whether the layers have one; a string is the field that
            says so.
        norms: the norms of a layer.
        norm: "rms", "rms_offset" (weights are stored less 1) or "layer".
        norm_eps: the field with its epsilon.
        qk_norm: norms of queries and keys: "", "head" (each head) or "projection" (all at once).
        unit_norm: the field that says whether rotated layers bring each head's query and key to one
            length; "" if none does.
        activation: the field that names it.
        activations: what the names in that field really mean.
        mlp: "gated", "fused" (gate and up in one tensor) or "plain" (no gate).
        mlp_name: what a layer calls it.
        inner_size: the field with its inner size.
        fused_qkv: whether queries, keys and values come in one tensor.
        windows: which layers slide.
        has_chunks: whether rotated layers, or those that `layer_types` names, attend within chunks
            of `attention_chunk_size` tokens.
        has_rope: which layers rotate queries and keys.
        interleaves_rope: whether the dimensions that turn together are neighbours.
        tempers: whether queries of the other layers grow with their position.
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
    section: str = ""
    prefix: str = ""
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    norms: LayerNorms = LayerNorms()
    norm: str = "rms"
    norm_eps: str = "rms_norm_eps"
    qk_norm: str = ""
    unit_norm: str = ""
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    mlp: str = "gated"
    mlp_name: str = "mlp"
    inner_size: str = "intermediate_size"
    fused_qkv: bool = False
    windows: Windows = Windows()
    has_chunks: bool = False
    has_rope: LayerRule = always
    interleaves_rope: bool = False
    tempers: bool = False
    partial_rope: bool = False
    local_theta: tuple[str, float] | None = None
    scalars: Mapping[str, str] = field(default_factory=dict)
    scales_embedding: bool = False
    query_scalar: str = ""
    has_sinks: bool = False
    experts: Experts | None = None
