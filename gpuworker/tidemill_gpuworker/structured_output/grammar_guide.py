"""A grammar's state in one sequence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from tidemill.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    import torch


class GrammarGuide:
    """A ``Guide`` over a compiled grammar; owns ``matcher``, a copy of nobody else's.

    Once the text is complete and cannot go on, EOS tokens alone may come, any number of them.
    """

    is_ready = True

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher = matcher
        self._field = field

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and cannot go on."""
        return self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is one that the grammar accepts."""
        return self._matcher.is_accepting()

    def fill_mask(self, row: "torch.Tensor") -> None:
        """Write which tokens may come next, see ``Guide``.

        Raises ``InvalidRequest`` if that costs more than one step may.
        """
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._matcher.is_error():
            raise InvalidRequest(
                f"{self._field}: it became too complex within the answer:"
                f" {self._matcher.get_error()[:200]}",
                field=self._field,
                fix="Make it simpler.",
            )

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come one after another; the guide does not move."""
        return self._matcher.validate_tokens(list(token_ids))

    def accept(self, token_id: int) -> None:
        """Advance by a token that was generated; raises ``ValueError`` if it may not come."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} may not come here: {self._matcher.get_error()}")

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens of an earlier attempt; raises ``ValueError`` as ``accept``."""
        for token_id in token_ids:
            self.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        if not self._matcher.rollback(num_tokens):
            raise ValueError(f"{num_tokens} tokens cannot be taken back")
