"""Reads what the scheduler asks of this worker."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from tidemill.protocol.codec import unpack
from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.messages import CommandKind
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_gpuworker.shell import metrics

_log = logging.getLogger(__name__)

#: How long one read blocks, and so how long the end of the reader may take.
BLOCK_MS = 500
#: Entries of one read.
MAX_COMMANDS = 256
#: Where a stream begins.
BEGIN = "0-0"


@dataclass(frozen=True, slots=True)
class Command:
    """One entry of the command stream.

    Runs and cancels have ``job_id`` and ``fence``; a hint has ``refs``, how many waiting jobs will
    use the prefix up to each routing hash.
    """

    entry_id: str
    kind: CommandKind
    job_id: str = ""
    fence: int = 0
    refs: Mapping[bytes, int] = field(default_factory=dict)


def parse_command(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Command | None:
    """Read an entry; None if it makes no sense to this version."""
    try:
        kind = CommandKind(fields[b"k"].decode())
        if kind is CommandKind.DRAIN:
            return Command(entry_id.decode(), kind)
        if kind is CommandKind.HINT:
            return Command(entry_id.decode(), kind, refs=_parse_refs(fields[b"h"]))
        return Command(entry_id.decode(), kind, fields[b"j"].decode(), int(fields[b"f"]))
    except (KeyError, ValueError, MalformedMessage):
        _log.warning("command %r is not understood and skipped", entry_id)
        metrics.BAD_COMMANDS.inc()
        return None


def _parse_refs(data: bytes) -> dict[bytes, int]:
    refs = unpack(data)
    if not isinstance(refs, dict):
        raise ValueError("hints are no map")
    for digest, count in refs.items():
        if not isinstance(digest, bytes) or len(digest) != ROUTING_HASH_BYTES:
            raise ValueError("a hint is for no routing hash")
        if type(count) is not int or count < 0:
            raise ValueError("a hint counts no jobs")
    return refs


class CommandReader:
    """Reads the command stream in order, each entry once.

    The worker's id is new with each process, so the stream begins with its first command and the
    cursor need not outlive the process.
    """

    def __init__(
        self,
        client: redis.Redis,
        stream: str,
        handle: Callable[[Sequence[Command]], None],
        *,
        block_ms: int = BLOCK_MS,
    ) -> None:
        self._client = client
        self._stream = stream
        self._handle = handle
        self._block_ms = block_ms
        self._cursor = BEGIN

    @property
    def cursor(self) -> str:
        """Id of the last entry that was handled."""
        return self._cursor

    def read(self) -> None:
        """Wait for commands and hand them over.

        If handling raises, the same entries are read again, so it must have had no effect.
        """
        # redis-py's type covers every protocol version; ours, see service.redis, makes lists.
        reply: Any = self._client.xread(
            {self._stream: self._cursor}, count=MAX_COMMANDS, block=self._block_ms
        )
        for _, entries in reply or ():
            parsed = (parse_command(entry_id, fields) for entry_id, fields in entries)
            self._handle([command for command in parsed if command is not None])
            self._cursor = entries[-1][0].decode()
