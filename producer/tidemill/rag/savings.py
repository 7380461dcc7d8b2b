"""How much of a set of prompts is shared, and so what prefix reuse can save at best; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE
from tidemill.rag._checks import check_count, check_ids, check_list, check_text


@dataclass(frozen=True, slots=True)
class Savings:
    """Sums over a set of prompts, in tokens, or in characters if the prompts were text."""

    num_prompts: int
    total_tokens: int
    shared_tokens: int

    @property
    def unique_tokens(self) -> int:
        """What must be computed even if nothing is ever computed twice."""
        return self.total_tokens - self.shared_tokens

    @property
    def bound(self) -> float:
        """Highest possible hit rate, from 0 to 1."""
        return self.shared_tokens / max(1, self.total_tokens)

    def __str__(self) -> str:
        """Return the sums as one line."""
        return (
            f"{self.num_prompts:,} prompts, {self.total_tokens:,} tokens:"
            f" {self.unique_tokens:,} to compute, {self.bound:.1%} shared"
        )


def expected_savings(
    prompts: Sequence[str] | Sequence[Sequence[int]], *, block_size: int | None = None
) -> Savings:
    """Return what a cache that forgets nothing would find of these prompts, in the best order.

    Token ids are counted as the cache does: whole blocks of ``block_size`` tokens (16), and never a
    prompt's last token, which has to be computed for its answer.  Text is counted by characters, in
    blocks of 1: a rough measure that needs no tokenizer.  Raises ``InvalidRequest``.
    """
    text = _is_text(prompts)
    size = block_size
    if size is None:
        size = 1 if text else DEFAULT_BLOCK_SIZE
    check_count(size, "block_size", "tokens", least=1)
    sequences = sorted(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)
    shared = 0
    # In sorted order nobody shares more with a prompt than the one before it.
    for before, prompt in pairwise(sequences):
        shared += min(_shared_len(before, prompt), max(0, len(prompt) - 1)) // size * size
    return Savings(len(sequences), sum(map(len, sequences)), shared)


def _is_text(prompts: Sequence[object]) -> bool:
    """Return whether the prompts are text and not token ids; refuse all else, and both at once."""
    check_list(prompts, "prompts", "prompts")
    text = any(isinstance(prompt, str) for prompt in prompts[:1])
    for index, prompt in enumerate(prompts):
        field = f"prompts.{index}"
        if text:
            check_text(prompt, field)
        else:
            check_list(prompt, field, "token ids")
            assert isinstance(prompt, Sequence)
            check_ids(prompt, field)
    return text


def _shared_len(left: Sequence[object], right: Sequence[object]) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
