"""What a structural constraint does to sampling."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # Slow to load, and not needed by what decides which sequences run.
    import torch


class TokenMask(Protocol):
    """Which tokens may come next."""

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete and EOS tokens alone may come, ``min_tokens`` or not."""

    def fill_mask(self, row: "torch.Tensor") -> None:
        """Write which tokens may come next.

        ``row`` is int32 [ceil(vocabulary / 32)] on the CPU; bit ``t % 32`` of word ``t // 32`` is
        token ``t``'s, 1 if it may come, as llguidance and xgrammar lay it out.  Raises
        ``GrammarTooComplex``.
        """


class Guide(TokenMask, Protocol):
    """The state of one sequence's constraint, such as a grammar: which tokens may come next.

    It belongs to its sequence and advances with it.  A sequence that is built again, after a
    failed step or a takeover, gets a fresh guide that has accepted the tokens known so far.
    """

    @property
    def is_ready(self) -> bool:
        """Whether the constraint is compiled; before that its sequence cannot be sampled."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come one after another; the guide does not move."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""

    def accept(self, token_id: int) -> None:
        """Advance by a token that was generated; raises ``ValueError`` if it may not come.

        Where that costs too much, ``fill_mask`` says so: the token has been told by then.
        """
