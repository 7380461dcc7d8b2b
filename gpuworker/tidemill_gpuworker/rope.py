"""Rotary position embedding: its frequencies and how checkpoints stretch them."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from tidemill.protocol.errors import DamagedModel, UnsupportedModel

DEFAULT_THETA = 10000.0
_SUPPORTED = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and, for models with a stretched context, how it was stretched.

    ``kind`` is "default", "linear" (positions divided by ``factor``) or "llama3" (only the slow
    frequencies divided, those between the two ``freq_factor`` bounds blended).
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the float32 [head_dim / 2] angle per position of each pair of dimensions."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        return self._llama3(frequencies) if self.kind == "llama3" else frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        # Llama 3.1 (arXiv 2407.21783); the operations are ordered as in transformers, because
        # float32 rounding of a frequency grows with the position.
        wavelengths = 2 * math.pi / frequencies
        longest = self.original_max_position / self.low_freq_factor
        shortest = self.original_max_position / self.high_freq_factor
        slowed = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        spread = self.high_freq_factor - self.low_freq_factor
        blend = (self.original_max_position / wavelengths - self.low_freq_factor) / spread
        blended = (1 - blend) * slowed / self.factor + blend * slowed
        is_medium = ~(wavelengths < shortest) * ~(wavelengths > longest)
        return torch.where(is_medium, blended, slowed)


def parse_rope(settings: Mapping[str, Any], path: Path) -> RopeConfig:
    """Read the rope settings of a config.json; ``path`` is named in complaints.

    Raises:
        UnsupportedModel: a kind of scaling other than default, linear and llama3.
        DamagedModel: a setting is missing or no positive number.
    """
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    _refuse_unsupported(kind, settings, path)
    fields = {"theta": "rope_theta"}
    if kind != "default":
        fields["factor"] = "factor"
    if kind == "llama3":
        fields |= {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
        fields["original_max_position"] = "original_max_position_embeddings"
    numbers = {ours: _positive(settings, theirs, path) for ours, theirs in fields.items()}
    original = int(numbers.pop("original_max_position", 0))
    return RopeConfig(kind=kind, original_max_position=original, **numbers)


def _refuse_unsupported(kind: str, settings: Mapping[str, Any], path: Path) -> None:
    if kind not in _SUPPORTED:
        reason = f"rope scaling {kind!r} is not supported, only {', '.join(_SUPPORTED)}"
    elif settings.get("partial_rotary_factor") not in (None, 1.0):
        reason = "rotary embedding of a part of each head is not supported"
    else:
        return
    raise UnsupportedModel(f"{path}: {reason}", fix="Choose another model.")


def _positive(settings: Mapping[str, Any], name: str, path: Path) -> float:
    value = settings.get(name)
    if not is_positive_number(value):
        raise DamagedModel(
            f"{path}: rope setting {name} must be a positive number, not {value!r}",
            fix="Download config.json again.",
        )
    return float(value)


def is_positive_number(value: object) -> TypeGuard[int | float]:
    """Whether a parsed JSON value is a number above zero that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value <= sys.float_info.max
