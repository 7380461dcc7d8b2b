"""What models change about plain causal attention."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The options of one attention call, as described in `reference.paged_attention`.

    Raises:
        ValueError: the window or the cap is negative or no number.
    """

    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window must be 0 or more tokens, not {self.window}")
        if not 0.0 <= self.soft_cap < math.inf:
            raise ValueError(f"soft_cap must be 0 or a positive number, not {self.soft_cap}")

    def first_visible(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0
