"""Feed-forward blocks."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.parallel.shard import Section
from tidemill_gpuworker.parallel.split_linear import load_columns, load_rows

Activation = Callable[[torch.Tensor], torch.Tensor]
FeedForward = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def activation_of(config: ModelConfig) -> Activation:
    """Return the activation function of the model's feed-forward blocks."""
    return _ACTIVATIONS[config.activation]


class GatedMLP:
    """down(activation(gate(x)) * up(x)), of which the ranks' parts add up.

    Args:
        config: the model's.
        checkpoint: where the weights are.
        prefix: what the names of the three layers start with.
        inner: features between them, on one rank.
        names: the layers, as gate, up and down.
        fused: whether gate and up come as one tensor, called ``gate_up_proj``.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        prefix: str,
        inner: int,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        fused: bool = False,
    ) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        inputs = [f"{prefix}.{name}" for name in names[:2]]
        if fused:
            inputs = [f"{prefix}.gate_up_proj"]
        sections = [Section(inner, config.shard)] * 2
        self._gate_up = load_columns(checkpoint, inputs, sections, hidden, with_bias=bias)
        self._down = load_rows(
            checkpoint, f"{prefix}.{names[2]}", hidden, inner, config.shard, with_bias=bias
        )
        self._activation = activation_of(config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``x`` [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


class PlainMLP:
    """c_proj(activation(c_fc(x))), of which the ranks' parts add up."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        sections = [Section(inner, config.shard)]
        self._up = load_columns(checkpoint, [f"{prefix}.c_fc"], sections, hidden, with_bias=bias)
        self._down = load_rows(
            checkpoint, f"{prefix}.c_proj", hidden, inner, config.shard, with_bias=bias
        )
        self._activation = activation_of(config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``x`` [tokens, hidden]."""
        return self._down(self._activation(self._up(x)))


def load_mlp(config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> FeedForward:
    """Return the dense block of the family; raises as ``load_linear`` does."""
    kind = FAMILIES[config.architecture].mlp
    if kind == "plain":
        return PlainMLP(config, checkpoint, prefix)
    fused = kind == "fused"
    return GatedMLP(config, checkpoint, prefix, config.intermediate_size, fused=fused)
