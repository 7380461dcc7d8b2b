"""Rotary position embedding of queries and keys."""

from dataclasses import dataclass

import torch

from tidemill_gpuworker.models.rope import RopeConfig


class RotaryEmbedding:
    """Rotates pairs of head dimensions by the token's position (arXiv 2104.09864).

    Dimension i of the first half of the rotated part turns with dimension i of the second, or each
    one with its neighbour, if ``rope`` is interleaved.  The angles of every position are computed
    once, in float32, and kept in the model's dtype; interleaved ones are not rounded.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, num_positions: int, like: torch.Tensor
    ) -> None:
        frequencies = rope.inverse_frequencies(head_dim)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
        self._is_interleaved = rope.is_interleaved
        if rope.is_interleaved:
            self._cos, self._sin = cos.to(like.device), sin.to(like.device)
        else:
            self._cos = torch.cat((cos, cos), dim=-1).to(like)
            self._sin = torch.cat((-sin, sin), dim=-1).to(like)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """Return the rotation of each token, shared by all layers and heads."""
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        if not self._is_interleaved:
            return Rotation(cos, sin)
        signed = torch.stack((-sin, sin), dim=-1).flatten(-2)
        return Rotation(cos.repeat_interleave(2, dim=-1), signed, is_interleaved=True)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines, and sines with the sign of their half, each [tokens, 1, rotary_dim].

    Interleaved ones are float32, and their signs take turns.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [tokens, heads, head_dim] with the start of each head rotated."""
        turned = self._neighbours_turned if self.is_interleaved else self._turned
        rotary_dim = self.cos.shape[-1]
        if rotary_dim == x.shape[-1]:
            return turned(x)
        return torch.cat((turned(x[..., :rotary_dim]), x[..., rotary_dim:]), dim=-1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        return (x * self.cos).addcmul_(swapped, self.sin)

    def _neighbours_turned(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        swapped = wide.reshape(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
        return (wide * self.cos).addcmul_(swapped, self.sin).to(x.dtype)
