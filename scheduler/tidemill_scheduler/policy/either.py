"""Two collections seen as one."""

from collections.abc import Collection, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Either(Collection[Item]):
    """What is in one collection or the other; making it takes no time, however large they are."""

    def __init__(self, one: Collection[Item], other: Collection[Item]) -> None:
        self._one = one
        self._other = other

    def __contains__(self, item: object) -> bool:
        return item in self._one or item in self._other

    def __iter__(self) -> Iterator[Item]:
        yield from self._one
        yield from (item for item in self._other if item not in self._one)

    def __len__(self) -> int:
        """An upper bound: what is in both counts twice."""
        return len(self._one) + len(self._other)
