"""Decoders of all native families over a flat token batch and a paged KV cache."""

import torch
from torch.nn import functional

from tidemill_gpuworker.inputs import StepInputs
from tidemill_gpuworker.kv_cache import KVCache
from tidemill_gpuworker.layer_config import LayerConfig
from tidemill_gpuworker.linear import make_linear
from tidemill_gpuworker.loader import Checkpoint
from tidemill_gpuworker.model_config import ModelConfig
from tidemill_gpuworker.model_families import FAMILIES
from tidemill_gpuworker.models.attention import Attention, StepContext
from tidemill_gpuworker.models.mlp import FeedForward, load_mlp
from tidemill_gpuworker.models.moe import SparseMLP
from tidemill_gpuworker.models.norms import Norm, load_norm
from tidemill_gpuworker.models.rotary import RotaryEmbedding
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
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        context: StepContext,
    ) -> None:
        """Add the layer's output to the residual stream ``x`` [tokens, hidden] in place."""
        attended = self._attention(self._attention_in(x), key_cache, value_cache, context)
        x.add_(self._attention_out(attended), alpha=self._multiplier)
        x.add_(self._mlp_out(self._mlp(self._mlp_in(x))), alpha=self._multiplier)


class Decoder:
    """A whole decoder; its weights are loaded by the constructor.

    Args:
        config: the model's shape.
        checkpoint: where its weights are.
        max_model_len: the longest context that will be served.
        num_positions: the longest sequence that there is room for.

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
    ) -> None:
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", *vocabulary)
        # Rounded to the model's dtype, as transformers does.
        self._multiplier = float(torch.tensor(config.embedding_multiplier).to(self._embedding))
        self._rotaries = {
            rope: RotaryEmbedding(
                rope.for_context(max_model_len), config.head_dim, num_positions, self._embedding
            )
            for rope in {layer.rope for layer in config.layers if layer.rope is not None}
        }
        self._layers = [
            DecoderLayer(config, layer, checkpoint, f"model.layers.{index}")
            for index, layer in enumerate(config.layers)
        ]
        self._norm = load_norm(config, checkpoint, "model.norm", config.hidden_size)
        tied = config.tie_word_embeddings
        self._lm_head = make_linear(
            self._embedding if tied else checkpoint.tensor("lm_head.weight", *vocabulary)
        )
        self._logits_divisor = config.logits_divisor
        self._logits_soft_cap = config.final_soft_cap

    def __call__(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Run a step; returns the hidden states [tokens, hidden], not yet normalised.

        Mutates the cache.
        """
        rotations = {rope: table.at(inputs.positions) for rope, table in self._rotaries.items()}
        context = StepContext(rotations, inputs, backend)
        x = functional.embedding(inputs.token_ids, self._embedding)
        if self._multiplier != 1.0:
            x.mul_(self._multiplier)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer(x, keys, values, context)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of some rows of the hidden states."""
        logits = self._lm_head(self._norm(hidden)).float()
        if self._logits_divisor != 1.0:
            logits.div_(self._logits_divisor)
        if self._logits_soft_cap:
            logits.div_(self._logits_soft_cap).tanh_().mul_(self._logits_soft_cap)
        return logits


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
    return load_mlp(config, checkpoint, f"{prefix}.mlp")
