"""Decoders of the Llama family over a flat token batch and a paged KV cache."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from tidemill_gpuworker.inputs import StepInputs
from tidemill_gpuworker.kv_cache import KVCache
from tidemill_gpuworker.linear import make_linear
from tidemill_gpuworker.linear_loader import load_linear
from tidemill_gpuworker.loader import Checkpoint
from tidemill_gpuworker.model_config import ModelConfig
from tidemill_kernels import AttentionBackend


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square normalisation (arXiv 1910.07467), computed in float32."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x``."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryEmbedding:
    """Rotates pairs of head dimensions by the token's position (arXiv 2104.09864).

    Dimension i of the first half of a head turns with dimension i of the second.  The angles of
    every position are computed once, in float32, and kept in the model's dtype.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, like: torch.Tensor) -> None:
        frequencies = config.rope.inverse_frequencies(config.head_dim)
        angles = torch.arange(max_model_len).float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(like)
        self._sin = torch.cat((-sin, sin), dim=-1).to(like)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """Return the rotation of each token, shared by all layers and heads."""
        return Rotation(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines, and sines with the sign of their half, each [tokens, 1, head_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [tokens, heads, head_dim] rotated."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        return (x * self.cos).addcmul_(swapped, self.sin)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers share in one step."""

    rotation: Rotation
    inputs: StepInputs
    backend: AttentionBackend


class Attention:
    """Grouped-query attention; writes the step's keys and values to the cache, then reads it."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        rows = [count * config.head_dim for count in heads]
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = load_linear(
            checkpoint, names, rows, config.hidden_size, with_bias=config.qkv_bias
        )
        self._output = load_linear(
            checkpoint,
            [f"{prefix}.o_proj"],
            [config.hidden_size],
            rows[0],
            with_bias=config.output_bias,
        )
        self._norms = _load_qk_norms(config, checkpoint, prefix) if config.qk_norm else None

    def __call__(
        self,
        x: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """Return the attention output for ``x`` [tokens, hidden]; mutates the caches."""
        num_rotated = self._num_heads + self._num_kv_heads
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key = self._rotated(heads[:, :num_rotated], context.rotation)
        value = heads[:, num_rotated:]
        inputs, backend = context.inputs, context.backend
        backend.reshape_and_cache(key, value, key_cache, value_cache, inputs.slot_mapping)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        backend.paged_attention(out, query, key_cache, value_cache, inputs.metadata, self._scale)
        return self._output(out.view(x.shape[0], -1))

    def _rotated(
        self, heads: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._norms is not None:
            query_norm, key_norm = self._norms
            query, key = heads.split_with_sizes([self._num_heads, self._num_kv_heads], dim=1)
            heads = torch.cat((query_norm(query), key_norm(key)), dim=1)
        query, key = rotation(heads).split_with_sizes([self._num_heads, self._num_kv_heads], dim=1)
        return query, key


class MLP:
    """The gated feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        bias = config.mlp_bias
        self._gate_up = load_linear(checkpoint, names, [inner, inner], hidden, with_bias=bias)
        self._down = load_linear(
            checkpoint, [f"{prefix}.down_proj"], [hidden], inner, with_bias=bias
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``x`` [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up))


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self._attention_norm = _load_norm(config, checkpoint, f"{prefix}.input_layernorm")
        self._attention = Attention(config, checkpoint, f"{prefix}.self_attn")
        self._mlp_norm = _load_norm(config, checkpoint, f"{prefix}.post_attention_layernorm")
        self._mlp = MLP(config, checkpoint, f"{prefix}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        context: StepContext,
    ) -> None:
        """Add the layer's output to the residual stream ``x`` [tokens, hidden] in place."""
        x.add_(self._attention(self._attention_norm(x), key_cache, value_cache, context))
        x.add_(self._mlp(self._mlp_norm(x)))


class LlamaModel:
    """A whole decoder; its weights are loaded by the constructor.

    Raises:
        DamagedModel: a weight is missing or shaped otherwise than the config says.
        UnsupportedModel: a weight is quantised.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, max_model_len: int) -> None:
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", *vocabulary)
        self._rotary = RotaryEmbedding(config, max_model_len, like=self._embedding)
        self._layers = [
            DecoderLayer(config, checkpoint, f"model.layers.{index}")
            for index in range(config.num_layers)
        ]
        self._norm = _load_norm(config, checkpoint, "model.norm")
        tied = config.tie_word_embeddings
        self._lm_head = make_linear(
            self._embedding if tied else checkpoint.tensor("lm_head.weight", *vocabulary)
        )

    def __call__(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Run a step; returns the hidden states [tokens, hidden], not yet normalised.

        Mutates the cache.
        """
        context = StepContext(self._rotary.at(inputs.positions), inputs, backend)
        x = functional.embedding(inputs.token_ids, self._embedding)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer(x, keys, values, context)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of some rows of the hidden states."""
        return self._lm_head(self._norm(hidden)).float()


def _load_norm(config: ModelConfig, checkpoint: Checkpoint, name: str) -> RMSNorm:
    return RMSNorm(checkpoint.tensor(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def _load_qk_norms(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str
) -> tuple[RMSNorm, RMSNorm]:
    query, key = (
        RMSNorm(checkpoint.tensor(f"{prefix}.{name}.weight", config.head_dim), config.rms_norm_eps)
        for name in ("q_norm", "k_norm")
    )
    return query, key
