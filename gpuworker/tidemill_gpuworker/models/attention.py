"""Grouped-query attention over the paged KV cache."""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.loading.layer_config import LayerConfig
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.memory.kv_cache import LayerCache
from tidemill_gpuworker.models.linear import Linear
from tidemill_gpuworker.models.norms import Norm, UnitNorm, load_norm
from tidemill_gpuworker.models.rope import RopeConfig
from tidemill_gpuworker.models.rotary import Rotation
from tidemill_gpuworker.models.temperature import Temperature
from tidemill_gpuworker.parallel.collectives import Collectives
from tidemill_gpuworker.parallel.shard import Section
from tidemill_gpuworker.parallel.split_linear import load_columns, load_rows
from tidemill_kernels import AttentionBackend, AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers share in one step; ``chunked`` is the layout of layers with chunks."""

    rotations: dict[RopeConfig, Rotation]
    temperatures: dict[Temperature, torch.Tensor]
    inputs: StepInputs
    chunked: AttentionMetadata
    backend: AttentionBackend
    ranks: Collectives


class QueryKeyNorms:
    """Norms of queries and keys before they are rotated.

    With ``per_head`` each head is normalised by itself, else all heads of a token together.
    """

    def __init__(self, query: Norm, key: Norm, *, per_head: bool) -> None:
        self._norms = (query, key)
        self._per_head = per_head

    def __call__(self, heads: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return ``heads`` [tokens, num_heads of queries, then of keys, head_dim] normalised."""
        parts = heads.split_with_sizes([num_heads, heads.shape[1] - num_heads], dim=1)
        pairs = zip(self._norms, parts, strict=True)
        if self._per_head:
            return torch.cat([norm(part) for norm, part in pairs], dim=1)
        whole = [norm(part.flatten(1)).view(part.shape) for norm, part in pairs]
        return torch.cat(whole, dim=1)


class Attention:
    """Writes the step's keys and values to the cache, then attends to what a layer may see.

    Its heads are those of one rank; the outputs of all ranks add up.
    """

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._rope = layer.rope
        self._scale = config.attention_scale
        self._window = layer.window
        self._is_chunked = layer.chunk > 0
        self._temperature = layer.temperature
        self._soft_cap = config.attention_soft_cap
        self._qkv = _load_qkv(config, checkpoint, prefix)
        self._output = load_rows(
            *(checkpoint, f"{prefix}.o_proj", config.hidden_size),
            config.num_heads * config.head_dim,
            config.shard,
            with_bias=config.output_bias,
        )
        self._norms = _load_qk_norms(config, layer, checkpoint, prefix)
        self._sinks = _load_sinks(config, checkpoint, prefix)

    def __call__(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        context: StepContext,
    ) -> torch.Tensor:
        """Return the attention output for ``x`` [tokens, hidden]; mutates the cache."""
        num_positioned = self._num_heads + self._num_kv_heads
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key = self._positioned(heads[:, :num_positioned], context)
        value = heads[:, num_positioned:]
        inputs, backend = context.inputs, context.backend
        tensors = (cache.keys, cache.values)
        backend.reshape_and_cache(key, value, *tensors, inputs.slot_mapping, cache.scales)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        metadata = context.chunked if self._is_chunked else inputs.metadata
        backend.paged_attention(
            *(out, query, *tensors, metadata, self._scale),
            window=self._window,
            soft_cap=self._soft_cap,
            sinks=self._sinks,
            scales=cache.scales,
        )
        return self._output(out.view(x.shape[0], -1))

    def _positioned(
        self, heads: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._norms is not None:
            heads = self._norms(heads, self._num_heads)
        if self._rope is not None:
            heads = context.rotations[self._rope](heads)
        query, key = heads.split_with_sizes([self._num_heads, self._num_kv_heads], dim=1)
        if self._temperature is not None:
            query = (query * context.temperatures[self._temperature]).to(query.dtype)
        return query, key


def _load_qkv(config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> Linear:
    queries = Section(config.num_heads * config.head_dim, config.shard)
    keys = Section(config.num_kv_heads * config.head_dim, config.kv_shard)
    names = [f"{prefix}.{name}_proj" for name in "qkv"]
    if FAMILIES[config.architecture].fused_qkv:
        names = [f"{prefix}.qkv_proj"]
    sections = [queries, keys, keys]
    return load_columns(checkpoint, names, sections, config.hidden_size, with_bias=config.qkv_bias)


def _load_qk_norms(
    config: ModelConfig, layer: LayerConfig, checkpoint: Checkpoint, prefix: str
) -> QueryKeyNorms | None:
    if layer.has_unit_norm:
        # A rotation keeps lengths, so the norm may come before it.
        unit = UnitNorm(config.norm_eps)
        return QueryKeyNorms(unit, unit, per_head=True)
    kind = FAMILIES[config.architecture].qk_norm
    if not kind:
        return None
    per_head = kind == "head"
    sizes = [1, 1] if per_head else [config.num_heads, config.num_kv_heads]
    query, key = (
        load_norm(config, checkpoint, f"{prefix}.{name}", count * config.head_dim)
        for name, count in zip(("q_norm", "k_norm"), sizes, strict=True)
    )
    return QueryKeyNorms(query, key, per_head=per_head)


def _load_sinks(config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> torch.Tensor | None:
    if not FAMILIES[config.architecture].has_sinks:
        return None
    sections = [Section(config.num_heads, config.shard)]
    return checkpoint.part(f"{prefix}.sinks", 0, sections).float()
