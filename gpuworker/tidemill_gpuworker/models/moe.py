"""Mixtures of experts: each token goes through the few experts that a router chooses for it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from tidemill_gpuworker.loading.layer_config import MoeConfig
from tidemill_gpuworker.loading.linear_loader import load_linear
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.loading.model_family import Experts
from tidemill_gpuworker.models.linear import make_linear
from tidemill_gpuworker.models.mlp import FeedForward, GatedMLP, activation_of
from tidemill_gpuworker.parallel.shard import WHOLE, Section, Shard


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token and their weights, both [tokens, experts per token]."""

    experts: torch.Tensor
    weights: torch.Tensor

    def by_expert(self, num_experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield each expert that is wanted, the tokens that want it, and its weights for them.

        Waits for the device once.
        """
        per_token = self.experts.shape[1]
        wanted = self.experts.flatten()
        order = wanted.argsort(stable=True)
        tokens, weights = order // per_token, self.weights.flatten()[order]
        start = 0
        for expert, count in enumerate(wanted.bincount(minlength=num_experts).tolist()):
            if count:
                chosen = slice(start, start + count)
                yield expert, tokens[chosen], weights[chosen]
            start += count


class SoftmaxRouter:
    """Chooses the most probable experts; their probabilities are the weights."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, name: str):
        rows = [moe.num_experts]
        self._scores = load_linear(checkpoint, [name], rows, config.hidden_size)
        self._num_chosen = moe.num_experts_per_token
        self._normalises = moe.normalises

    def __call__(self, x: torch.Tensor) -> Routes:
        """Return the routes of ``x`` [tokens, hidden]."""
        probabilities = self._scores(x).float().softmax(dim=-1)
        weights, experts = probabilities.topk(self._num_chosen, dim=-1)
        if self._normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routes(experts, weights.to(x.dtype))


class TopRouter:
    """Chooses the experts of the highest scores; a softmax over those gives the weights."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, name: str):
        rows = [moe.num_experts]
        self._scores = load_linear(checkpoint, [name], rows, config.hidden_size, with_bias=True)
        self._num_chosen = moe.num_experts_per_token

    def __call__(self, x: torch.Tensor) -> Routes:
        """Return the routes of ``x`` [tokens, hidden]."""
        best, experts = self._scores(x).topk(self._num_chosen, dim=-1)
        return Routes(experts, best.softmax(dim=-1))


class SigmoidRouter:
    """Chooses the experts of the highest scores; the sigmoid of each score is its weight."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, name: str):
        rows = [moe.num_experts]
        self._scores = load_linear(checkpoint, [name], rows, config.hidden_size)
        self._num_chosen = moe.num_experts_per_token

    def __call__(self, x: torch.Tensor) -> Routes:
        """Return the routes of ``x`` [tokens, hidden]."""
        best, experts = self._scores(x).topk(self._num_chosen, dim=-1)
        return Routes(experts, best.float().sigmoid().to(x.dtype))


class StackedExpert:
    """An expert of Llama 4, a gated block of matrices that are stored as [in, out]."""

    def __init__(self, config: ModelConfig, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = make_linear(gate_up.T.contiguous())
        self._down = make_linear(down.T.contiguous())
        self._activation = activation_of(config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the expert's output for ``x`` [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


class ClampedExpert:
    """An expert of GPT-OSS: down((clamp(up) + 1) * gate * sigmoid(alpha * gate))."""

    def __init__(
        self, moe: MoeConfig, tensors: dict[str, torch.Tensor], index: int, shard: Shard = WHOLE
    ) -> None:
        # Gate and up come interleaved, and both matrices are stored as [in, out].
        gate_up = tensors["gate_up_proj"][index].T
        bias = tensors["gate_up_proj_bias"][index]
        self._gate_up = make_linear(
            torch.cat((gate_up[::2], gate_up[1::2])), torch.cat((bias[::2], bias[1::2]))
        )
        self._down = make_linear(
            tensors["down_proj"][index].T.contiguous(),
            # Added once, by one rank.
            None if shard.index else tensors["down_proj_bias"][index].clone(),
        )
        self._alpha, self._limit = moe.alpha, moe.limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the expert's output for ``x`` [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        gate = gate.clamp(max=self._limit)
        up = up.clamp(min=-self._limit, max=self._limit)
        return self._down((up + 1) * (gate * torch.sigmoid(gate * self._alpha)))


class SharedExpert:
    """The expert that every token takes, weighted by a gate of its own."""

    def __init__(self, config: ModelConfig, inner: int, checkpoint: Checkpoint, name: str) -> None:
        self._expert = GatedMLP(config, checkpoint, name, inner)
        self._gate = load_linear(checkpoint, [f"{name}_gate"], [1], config.hidden_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the expert's weighted output for ``x`` [tokens, hidden]."""
        return functional.sigmoid(self._gate(x)) * self._expert(x)


_ROUTERS: dict[str, type[SoftmaxRouter | TopRouter | SigmoidRouter]] = {
    "linear": SoftmaxRouter,
    "gpt_oss": TopRouter,
    "llama4": SigmoidRouter,
}


class SparseMLP:
    """The weighted sum of the chosen experts, computed expert by expert.

    In Llama 4 the weights multiply what goes into the experts, not what comes out of them.  A rank
    holds a part of every expert; the ranks' sums add up.
    """

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, prefix: str
    ) -> None:
        layout = FAMILIES[config.architecture].experts or Experts()
        self._weighs_inputs = layout.kind == "llama4"
        self._router = _ROUTERS[layout.kind](config, moe, checkpoint, f"{prefix}.{layout.router}")
        self._experts = _load_experts(config, moe, checkpoint, prefix)
        self._shared = _load_shared_expert(config, moe, checkpoint, prefix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``x`` [tokens, hidden]."""
        total = torch.zeros_like(x)
        for expert, tokens, weights in self._router(x).by_expert(len(self._experts)):
            chosen, weights = x[tokens], weights[:, None]
            if self._weighs_inputs:
                output = self._experts[expert](chosen * weights)
            else:
                output = self._experts[expert](chosen) * weights
            total.index_add_(0, tokens, output)
        return total if self._shared is None else total.add_(self._shared(x))


def _load_experts(
    config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, prefix: str
) -> list[FeedForward]:
    layout = FAMILIES[config.architecture].experts or Experts()
    name = f"{prefix}.{layout.experts}"
    match layout.kind:
        case "gpt_oss":
            return _load_clamped_experts(config, moe, checkpoint, name)
        case "llama4":
            return _load_stacked_experts(config, moe, checkpoint, name)
    inner, names = moe.intermediate_size, layout.projections
    return [
        GatedMLP(config, checkpoint, f"{name}.{index}", inner, names=names)
        for index in range(moe.num_experts)
    ]


def _load_shared_expert(
    config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, prefix: str
) -> FeedForward | None:
    layout = FAMILIES[config.architecture].experts or Experts()
    name, inner = f"{prefix}.{layout.shared}", moe.shared_intermediate_size
    if not inner:
        return None
    if layout.kind == "llama4":
        return GatedMLP(config, checkpoint, name, inner)
    return SharedExpert(config, inner, checkpoint, name)


def _load_stacked_experts(
    config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, name: str
) -> list[FeedForward]:
    count, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
    columns, rows = [Section(inner, config.shard)] * 2, [Section(inner, config.shard)]
    gate_up = checkpoint.part(f"{name}.gate_up_proj", 2, columns, count, hidden)
    down = checkpoint.part(f"{name}.down_proj", 1, rows, count, hidden)
    return [StackedExpert(config, *pair) for pair in zip(gate_up, down, strict=True)]


def _load_clamped_experts(
    config: ModelConfig, moe: MoeConfig, checkpoint: Checkpoint, name: str
) -> list[FeedForward]:
    count, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
    gate_up, down = [Section(2 * inner, config.shard)], [Section(inner, config.shard)]
    tensors = {
        "gate_up_proj": checkpoint.part(f"{name}.gate_up_proj", 2, gate_up, count, hidden),
        "gate_up_proj_bias": checkpoint.part(f"{name}.gate_up_proj_bias", 1, gate_up, count),
        "down_proj": checkpoint.part(f"{name}.down_proj", 1, down, count, hidden),
        "down_proj_bias": checkpoint.tensor(f"{name}.down_proj_bias", count, hidden),
    }
    return [ClampedExpert(moe, tensors, index, config.shard) for index in range(count)]
