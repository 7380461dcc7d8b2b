"""Queries that grow with their position, so that attention stays sharp over long contexts."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Temperature:
    """Multiplies a query by 1 + strength x log(1 + how often ``floor`` tokens lie up to it).

    From "Scalable-Softmax" (arXiv 2501.19399) in the form of Llama 4.
    """

    floor: int
    strength: float

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the float32 [tokens, 1, 1] factors of tokens at ``positions``."""
        # The operations are ordered as in transformers.
        steps = ((positions.float() + 1.0) / self.floor).floor()
        return (steps.log1p() * self.strength + 1.0)[:, None, None]
