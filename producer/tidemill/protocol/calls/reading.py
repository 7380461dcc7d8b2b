"""Calls by which a leader reads its streams."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.calls.replies import text
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys

Fields = dict[bytes, bytes]
#: Entry id and fields; a pending entry that was deleted has none.
Entry = tuple[bytes, Fields | None]


@dataclass(frozen=True, slots=True)
class ReadError:
    """What the server says in place of a stream's entries, such as NOGROUP."""

    message: str


@dataclass(frozen=True, slots=True)
class FencedReply:
    """The entries of each stream, or the error in their place, and the server's time in ms."""

    entries: tuple[list[Entry] | ReadError, ...]
    now_ms: int


def read(
    keys: ShardKeys, *, epoch: int, positions: Mapping[str, str], count: int
) -> Call[FencedReply]:
    """Read up to ``count`` entries of each stream behind its position, the last entry id known.

    As the group's only consumer; none means that none is left.  Entries read before and not
    acknowledged come again, so a lost reply loses none of them.  Raises ``StaleEpoch``, with
    nothing read, if another scheduler leads.
    """
    return Call(
        "read",
        (keys.epoch, *positions),
        (epoch, count, *positions.values()),
        lambda reply: FencedReply(tuple(map(_stream, reply[1:])), int(reply[0])),
    )


def acknowledge(stream: str, entry_ids: Sequence[str | bytes]) -> Call[int]:
    """Take entries off a stream that its group has read, 256 at most; how many there were."""
    return Call("acknowledge", (stream,), tuple(entry_ids), int)


def written_entries(reply: Sequence[Any]) -> list[tuple[bytes, Fields]]:
    """Read stream entries as a function returns them: id and a flat list of fields."""
    return [(entry_id, _fields(flat)) for entry_id, flat in reply]


def _stream(reply: Sequence[Any]) -> list[Entry] | ReadError:
    if reply[0] is None:
        return ReadError(text(reply[1]))
    return [(entry_id, None if flat is None else _fields(flat)) for entry_id, flat in reply[0]]


def _fields(flat: Sequence[bytes]) -> Fields:
    return dict(zip(flat[::2], flat[1::2], strict=True))
