"""Decoders of all native families over a flat token batch and a paged KV cache."""

import torch

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.loading.layer_config import LayerConfig
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.memory.kv_cache import KVCache, LayerCache
from tidemill_gpuworker.models.attention import Attention, StepContext
from tidemill_gpuworker.models.chunks import in_chunks
from tidemill_gpuworker.models.ends import Embedding, Head, splits_vocabulary
from tidemill_gpuworker.models.mlp import FeedForward, load_mlp
from tidemill_gpuworker.models.moe import SparseMLP
from tidemill_gpuworker.models.norms import Norm, load_norm
from tidemill_gpuworker.models.rotary import RotaryEmbedding
from tidemill_gpuworker.parallel.collectives import NO_COLLECTIVES, Collectives
from tidemill_gpuworker.parallel.shard import EVERYTHING, Place
from tidemill_kernels import AttentionBackend


class DecoderLayer:
    """Attention and MLP, each between the norms its family has, added to the residual stream."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, checkpoint: Checkpoint, prefix: str
    ) -> None:
        norms = FAMILIES[config.architecture].norms
        self._attention_in, self._attention_out, self._mlp_in, self._mlp_out = (
            _load_layer_norm(config, checkpoint, prefix, name)
            for name in (norms.attention_in, norms.attention_out, norms.mlp_in, norms.mlp_out)
        )
        self._attention = Attention(config, layer, checkpoint, f"{prefix}.self_attn")
        self._mlp = _load_feed_forward(config, layer, checkpoint, prefix)
        self._multiplier = config.residual_multiplier

    def __call__(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        context: StepContext,
    ) -> None:
        """Add the layer's output to the residual stream ``x`` [tokens, hidden] in place."""
        attended = self._attention(self._attention_in(x), cache, context)
        attended = context.ranks.add_up(attended)
        x.add_(self._attention_out(attended), alpha=self._multiplier)
        transformed = context.ranks.add_up(self._mlp(self._mlp_in(x)))
        x.add_(self._mlp_out(transformed), alpha=self._multiplier)


class Decoder:
    """A decoder, or the part of it that one rank computes; the constructor loads its weights.

    Args:
        config: the shape of the part.
        checkpoint: where its weights are.
        max_model_len: the longest context that will be served.
        num_positions: the longest sequence that there is room for.
        place: which part it is.
        ranks: the others.

    Raises:
        DamagedModel: a weight is missing or shaped otherwise than the config says.
        UnsupportedModel: a weight is stored in a form that cannot be read.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        num_positions: int,
        place: Place = EVERYTHING,
        ranks: Collectives = NO_COLLECTIVES,
    ) -> None:
        self._hidden_size, self._ranks = config.hidden_size, ranks
        self._chunk = config.attention_chunk
        tempered = {layer.temperature for layer in config.layers}
        self._temperatures = [each for each in tempered if each is not None]
        self._like = torch.empty(0, dtype=checkpoint.dtype, device=checkpoint.device)
        self._embedding = None if place.stage.index else Embedding(config, checkpoint)
        self._rotaries = {
            rope: RotaryEmbedding(
                rope.for_context(max_model_len), config.head_dim, num_positions, self._like
            )
            for rope in {layer.rope for layer in config.layers if layer.rope is not None}
        }
        self._layers = [
            DecoderLayer(config, layer, checkpoint, f"model.layers.{index}")
            for index, layer in enumerate(config.layers, config.first_layer)
        ]
        has_head = place.leads or splits_vocabulary(config)
        self._head = (
            Head(config, checkpoint, self._embedding, ranks)
            if self._embedding is not None and has_head
            else None
        )

    @property
    def head_is_split(self) -> bool:
        """Whether the other ranks of the first stage take part in ``logits``."""
        return self._head is not None and self._head.is_split

    def __call__(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Run a step; returns the hidden states [tokens, hidden], not yet normalised.

        Mutates the cache.  On later stages of a pipeline the result means nothing.
        """
        context = self._context(inputs, cache, backend)
        x = self._enter(inputs.token_ids)
        for layer, layer_cache in zip(self._layers, cache.layers, strict=True):
            layer(x, layer_cache, context)
        return self._ranks.pass_on(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of some rows of the hidden states."""
        assert self._head is not None, "the rank has a head"
        return self._head(hidden)

    def _context(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> StepContext:
        chunked = inputs.metadata
        if self._chunk:
            chunked = in_chunks(chunked, self._chunk, cache.layers[0].keys.shape[2])
        return StepContext(
            rotations={rope: each.at(inputs.positions) for rope, each in self._rotaries.items()},
            temperatures={each: each.at(inputs.positions) for each in self._temperatures},
            inputs=inputs,
            chunked=chunked,
            backend=backend,
            ranks=self._ranks,
        )

    def _enter(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._embedding is not None:
            return self._embedding(token_ids)
        return self._ranks.receive_hidden(self._like.new_empty(len(token_ids), self._hidden_size))


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _load_layer_norm(config: ModelConfig, checkpoint: Checkpoint, prefix: str, name: str) -> Norm:
    if not name:
        return _identity
    return load_norm(config, checkpoint, f"{prefix}.{name}", config.hidden_size)


def _load_feed_forward(
    config: ModelConfig, layer: LayerConfig, checkpoint: Checkpoint, prefix: str
) -> FeedForward:
    if layer.is_sparse and config.moe is not None:
        return SparseMLP(config, config.moe, checkpoint, prefix)
    return load_mlp(config, checkpoint, f"{prefix}.{FAMILIES[config.architecture].mlp_name}")
