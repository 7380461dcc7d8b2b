"""What several functions answer."""

from dataclasses import dataclass
from typing import Any

#: Reply code of an append that failed inside the server for a reason of its own.
_APPEND_ERROR = -1_000_000_001


@dataclass(frozen=True, slots=True)
class Written:
    """Reply to one append or finish: accepted, refused for good, or at another position.

    ``num_tokens`` is set when the log holds another number of tokens than the caller thought:
    its earlier write whose reply was lost, or a tail that a failover dropped.
    """

    accepted: bool
    owned: bool
    num_tokens: int | None = None
    state: str = ""


def written(code: int, state: str = "") -> Written:
    """Read the reply to a write."""
    if code == 1:
        return Written(accepted=True, owned=True, state=state)
    if code in (0, -1):
        return Written(accepted=False, owned=False, state=state)
    position = None if code == _APPEND_ERROR else -2 - code
    return Written(accepted=False, owned=True, num_tokens=position, state=state)


def text(value: Any) -> str:
    """Read a string that a client may have decoded already."""
    return value.decode() if isinstance(value, bytes) else str(value)
