"""Rotary position embedding: its frequencies and how checkpoints stretch them."""

import math
import sys
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and, for models with a stretched context, how it was stretched.

    ``kind`` is one of
    "default";
    "linear": positions divided by ``factor``;
    "llama3": only the slow frequencies divided, those between two bounds blended;
    "yarn" (arXiv 2309.00071): the same with bounds in rotations over the original context;
    "longrope" (arXiv 2402.13753): each frequency divided by a factor of its own, of one list up
    to the original context and of another beyond it.

    Attributes:
        share: the part of each head that is rotated, from its start.
        amplitude: multiplies cosines and sines.
        is_long: whether the factors for beyond the original context apply.
        is_interleaved: whether the dimensions that turn together are neighbours.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    share: float = 1.0
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    is_interleaved: bool = False

    def for_context(self, max_model_len: int) -> "RopeConfig":
        """Return the embedding as it is in contexts of up to ``max_model_len`` tokens."""
        if self.kind != "longrope":
            return self
        return replace(self, is_long=max_model_len > self.original_max_position)

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(head_dim * self.share)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the float32 [rotary_dim / 2] angle per position of each pair of dimensions."""
        dim = self.rotary_dim(head_dim)
        wavelengths = self.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        match self.kind:
            case "linear":
                return 1.0 / wavelengths / self.factor
            case "llama3":
                return self._llama3(1.0 / wavelengths)
            case "yarn":
                return self._yarn(wavelengths, dim)
            case "longrope":
                factors = self.long_factors if self.is_long else self.short_factors
                return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        return 1.0 / wavelengths

    # The operations below are ordered as in transformers, because float32 rounding of a frequency
    # grows with the position.

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        # Llama 3.1 (arXiv 2407.21783).
        wavelengths = 2 * math.pi / frequencies
        longest = self.original_max_position / self.low_freq_factor
        shortest = self.original_max_position / self.high_freq_factor
        slowed = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        spread = self.high_freq_factor - self.low_freq_factor
        blend = (self.original_max_position / wavelengths - self.low_freq_factor) / spread
        blended = (1 - blend) * slowed / self.factor + blend * slowed
        is_medium = ~(wavelengths < shortest) * ~(wavelengths > longest)
        return torch.where(is_medium, blended, slowed)

    def _yarn(self, wavelengths: torch.Tensor, dim: int) -> torch.Tensor:
        low, high = (self._turning_dim(beta, dim) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        span = high - low if high != low else 0.001
        ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / span, 0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def _turning_dim(self, num_rotations: float, dim: int) -> float:
        # The dimension that turns so many times over the original context.
        turns = math.log(self.original_max_position / (num_rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(self.theta))


def is_positive_number(value: object) -> TypeGuard[int | float]:
    """Whether a parsed JSON value is a number above zero that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value <= sys.float_info.max
