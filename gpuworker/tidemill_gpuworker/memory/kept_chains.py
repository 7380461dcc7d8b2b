"""Which cached prefixes are evicted last, because waiting jobs will use them."""

from collections.abc import Callable


class KeptChains:
    """Block hashes worth keeping: those of hinted prefixes, with all that lead to them.

    A chain is kept from its tip to its head, because a prefix without its head is of no use.  Each
    hash counts its reasons: a hint of its own, and each kept hash that follows it.  So chains that
    share a head are told apart in as many operations as they differ in.
    """

    def __init__(self, parent_of: Callable[[bytes], bytes | None]) -> None:
        self._parent_of = parent_of
        #: Each kept hash, by how many reasons; to be read only.
        self.reasons: dict[bytes | None, int] = {}
        self._parents: dict[bytes, bytes | None] = {}
        self._tips: set[bytes] = set()

    def has_kept_child(self, block_hash: bytes) -> bool:
        """Whether a kept chain goes on behind ``block_hash``."""
        return self.reasons.get(block_hash, 0) > (block_hash in self._tips)

    def keep(self, tip: bytes) -> list[bytes]:
        """Keep the chain that ends in ``tip``; returns what was not kept before, tip first."""
        if tip in self._tips:
            return []
        self._tips.add(tip)
        added: list[bytes] = []
        current: bytes | None = tip
        while current is not None:
            self.reasons[current] = self.reasons.get(current, 0) + 1
            if self.reasons[current] > 1:
                break
            added.append(current)
            parent = self._parent_of(current)
            self._parents[current] = parent
            current = parent
        return added

    def drop(self, tip: bytes) -> list[bytes]:
        """Take back ``keep``; returns what is not kept any more, tip first."""
        if tip not in self._tips:
            return []
        self._tips.remove(tip)
        dropped: list[bytes] = []
        current: bytes | None = tip
        while current is not None:
            self.reasons[current] -= 1
            if self.reasons[current]:
                break
            del self.reasons[current]
            dropped.append(current)
            current = self._parents.pop(current)
        return dropped
