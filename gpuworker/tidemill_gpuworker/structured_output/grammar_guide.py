"""A grammar's state in one sequence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from tidemill.protocol.errors import GrammarTooComplex

if TYPE_CHECKING:
    import torch


#: How llguidance begins to tell that a token breaks the grammar; all its other errors are limits.
_BROKEN = "doesn't satisfy the grammar"
_MAX_SHOWN_CHARS = 200


class GrammarGuide:
    """A ``Guide`` over a compiled grammar, of which it works on a copy.

    Once the text is complete and cannot go on, EOS tokens alone may come, any number of them.
    """

    is_ready = True

    def __init__(self, compiled: LLMatcher, field: str) -> None:
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._field = field
        self._token_ids: list[int] = []

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and cannot go on."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is one that the grammar accepts."""
        return self._matcher.is_accepting()

    def fill_mask(self, row: "torch.Tensor") -> None:
        """Write which tokens may come next, see ``Guide``.

        Raises ``GrammarTooComplex`` if that costs more than one step may, now or before.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        self._check()

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come one after another; the guide does not move."""
        return self._matcher.validate_tokens(list(token_ids))

    def accept(self, token_id: int) -> None:
        """Advance by a token that was generated; raises ``ValueError`` if it may not come."""
        self._token_ids.append(token_id)
        if self._matcher.is_error() or self._matcher.consume_token(token_id):
            return
        if _BROKEN in self._reason:
            raise ValueError(f"token {token_id} may not come here: {self._reason}")

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens of an earlier attempt.

        Raises ``ValueError`` as ``accept`` does, and ``GrammarTooComplex``.
        """
        for token_id in token_ids:
            self.accept(token_id)
        self._check()

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        del self._token_ids[len(self._token_ids) - num_tokens :]
        if self._matcher.is_error():
            # Whatever was too complex lay behind those tokens, or it shows again.
            known, self._token_ids = self._token_ids, []
            self._matcher = self._compiled.deep_copy()
            for token_id in known:
                self.accept(token_id)
        elif not self._matcher.rollback(num_tokens):
            raise ValueError(f"{num_tokens} tokens cannot be taken back")

    @property
    def _reason(self) -> str:
        # What follows the first line quotes the answer.
        return self._matcher.get_error().partition("\n")[0][:_MAX_SHOWN_CHARS]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarTooComplex(self._field, self._reason)
