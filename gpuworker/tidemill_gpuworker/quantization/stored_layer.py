"""One linear layer of a checkpoint as a format reads it, and what it reads."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tidemill.protocol.errors import DamagedModel
from tidemill_kernels.packed_weight import PackedWeight

_FLOATS = ("BF16", "F16", "F32", "F64")


class TensorSource(Protocol):
    """The tensors of a checkpoint in the form they are stored in."""

    def stored_dtype(self, name: str) -> str | None:
        """Return the name that the file gives the tensor's dtype, None if there is no tensor."""
        ...

    def stored(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy on the CPU; raises DamagedModel if it is missing or shaped otherwise."""
        ...

    def stored_any_shape(self, name: str) -> torch.Tensor:
        """Return a copy on the CPU; raises DamagedModel if it is missing."""
        ...


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The tensors whose names begin with that of the layer."""

    source: TensorSource
    name: str
    out_features: int
    in_features: int

    def has(self, suffix: str) -> bool:
        """Whether the layer has such a tensor."""
        return self.source.stored_dtype(f"{self.name}.{suffix}") is not None

    def is_plain(self) -> bool:
        """Whether its weight is stored as ordinary floats."""
        return self.source.stored_dtype(f"{self.name}.weight") in _FLOATS

    def read(self, suffix: str, *shape: int) -> torch.Tensor:
        """Return a tensor as stored; raises DamagedModel if it is missing or shaped otherwise."""
        return self.source.stored(f"{self.name}.{suffix}", *shape)

    def read_any(self, suffix: str) -> torch.Tensor:
        """Return a tensor of whatever shape; raises DamagedModel if it is missing."""
        return self.source.stored_any_shape(f"{self.name}.{suffix}")

    def skip(self, *suffixes: str) -> None:
        """Take tensors that nothing is computed with, where there are any."""
        for suffix in suffixes:
            if self.has(suffix):
                self.read_any(suffix)

    def check_divides(self, unit: int, size: int, what: str) -> None:
        """Raise DamagedModel unless ``size`` is a multiple of ``unit``."""
        if size % unit:
            raise self.damaged(f"{what} {size} is no multiple of {unit}")

    def damaged(self, reason: str) -> DamagedModel:
        """Return the error for tensors that contradict each other."""
        return DamagedModel(
            f"{self.name}: {reason}",
            fix="Download the model again; config.json and weights must be of the same model.",
        )


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out_features, in_features]: packed, plus what is added to it.

    ``outliers`` is a sparse COO float32 tensor of the same shape, or None.
    """

    packed: PackedWeight
    outliers: torch.Tensor | None = None


class Format(Protocol):
    """The layout of a quantised layer's tensors."""

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight on the CPU.

        Raises:
            DamagedModel: a tensor is missing or contradicts another.
            UnsupportedModel: the layer uses a feature of the format that is not read.
        """
        ...
