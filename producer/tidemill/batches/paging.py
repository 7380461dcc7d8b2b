"""Pages of files and batches, the newest first; what is read for them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tidemill._reads import Read

#: Objects that are read in one round trip.
CHUNK = 200


class Listed(Protocol):
    """What a page is made of."""

    def plain(self) -> dict[str, Any]:
        """Return the object of OpenAI's API."""


T = TypeVar("T", bound=Listed)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some objects, and whether there are more behind them."""

    items: Sequence[T]
    has_more: bool

    def plain(self) -> dict[str, Any]:
        """Return the list of OpenAI's API."""
        data = [item.plain() for item in self.items]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": self.has_more,
        }


def ids_behind(index: str, after: str, *, ascending: bool) -> Read[list[str]]:
    """Read the next ids of an index behind ``after``, from its start if that is empty."""
    if ascending:
        command = ("ZRANGEBYLEX", index, f"({after}" if after else "-", "+", "LIMIT", 0, CHUNK)
    else:
        command = ("ZREVRANGEBYLEX", index, f"({after}" if after else "+", "-", "LIMIT", 0, CHUNK)
    return Read((command,), lambda replies: [found.decode() for found in replies[0]])


def hashes(keys: Sequence[str]) -> Read[list[dict[bytes, bytes]]]:
    """Read whole hashes, empty ones for those that are not there."""
    return Read(tuple(("HGETALL", key) for key in keys), list)


async def collect(
    limit: int,
    next_ids: Callable[[str], Awaitable[list[str]]],
    load: Callable[[list[str]], Awaitable[list[T | None]]],
    after: str,
) -> Page[T]:
    """Gather ``limit`` objects behind ``after``; those that load as None are passed over."""
    found: list[T] = []
    while len(found) <= limit and (ids := await next_ids(after)):
        found += [item for item in await load(ids) if item is not None]
        after = ids[-1]
    return Page(found[:limit], len(found) > limit)
