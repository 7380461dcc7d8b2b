"""Normalisation of the last dimension, computed in float32."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_families import FAMILIES


class Norm(Protocol):
    """Maps [..., size] to a new tensor of the same shape and dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised."""
        ...


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square normalisation (arXiv 1910.07467)."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class UnitNorm:
    """The same without a weight."""

    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised."""
        return functional.rms_norm(x, x.shape[-1:], None, self.eps)


@dataclass(frozen=True, slots=True)
class OffsetRMSNorm:
    """RMSNorm with a float32 weight, and one rounding at the very end, as Gemma has it."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Normalisation by mean and variance (arXiv 1607.06450)."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def load_norm(config: ModelConfig, checkpoint: Checkpoint, name: str, size: int) -> Norm:
    """Return the norm called ``name`` over ``size`` features, of the kind the family has.

    Raises:
        DamagedModel: a weight is missing or shaped otherwise.
    """
    kind, eps = FAMILIES[config.architecture].norm, config.norm_eps
    weight = checkpoint.tensor(f"{name}.weight", size)
    if kind == "layer":
        return LayerNorm(weight, checkpoint.tensor(f"{name}.bias", size), eps)
    if kind == "rms_offset":
        return OffsetRMSNorm(1.0 + weight.float(), eps)
    return RMSNorm(weight, eps)
