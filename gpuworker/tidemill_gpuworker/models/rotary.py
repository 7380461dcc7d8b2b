"""Rotary position embedding of queries and keys."""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.models.rope import RopeConfig


class RotaryEmbedding:
    """Rotates pairs of head dimensions by the token's position (arXiv 2104.09864).

    Dimension i of the first half of the rotated part turns with dimension i of the second.  The
    angles of every position are computed once, in float32, and kept in the model's dtype.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, num_positions: int, like: torch.Tensor
    ) -> None:
        frequencies = rope.inverse_frequencies(head_dim)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
        self._cos = torch.cat((cos, cos), dim=-1).to(like)
        self._sin = torch.cat((-sin, sin), dim=-1).to(like)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """Return the rotation of each token, shared by all layers and heads."""
        return Rotation(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines, and sines with the sign of their half, each [tokens, 1, rotary_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [tokens, heads, head_dim] with the start of each head rotated."""
        rotary_dim = self.cos.shape[-1]
        if rotary_dim == x.shape[-1]:
            return self._turned(x)
        return torch.cat((self._turned(x[..., :rotary_dim]), x[..., rotary_dim:]), dim=-1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        return (x * self.cos).addcmul_(swapped, self.sin)
