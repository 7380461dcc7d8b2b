"""Reads of a consumer group in the name of one epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis import exceptions

from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.keys import CONSUMER, GROUP, ShardKeys

Fields = dict[bytes, bytes]
#: Entry id and fields; a pending entry that was deleted has none.
Entry = tuple[bytes, Fields | None]


@dataclass(frozen=True, slots=True)
class FencedReply:
    """The entries of each stream, or the server's error in their place, and the server's time."""

    entries: tuple[list[Entry] | exceptions.ResponseError, ...]
    server_seconds: float


async def read_fenced(
    client: redis.asyncio.Redis,
    keys: ShardKeys,
    epoch: int,
    positions: Mapping[str, str],
    count: int,
) -> FencedReply:
    """Read ``count`` entries of each stream from its position, as the group's only consumer.

    Raises ``StaleEpoch``, with nothing read, if another scheduler leads.  A leader that was paused
    must not take entries away from its successor, who would never see them.  For the same reason
    the client must not retry: a reply lost to a retry holds entries that ``>`` never shows again.
    """
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(keys.epoch)
        if await pipe.get(keys.epoch) != str(epoch).encode():
            raise StaleEpoch(f"epoch {epoch} of shard {keys.shard} is over")
        # redis-py leaves multi untyped.
        pipe.multi()  # type: ignore[no-untyped-call]
        for stream, position in positions.items():
            streams: Any = {stream: position}
            pipe.xreadgroup(GROUP, CONSUMER, streams, count=count)
        pipe.time()
        try:
            *replies, (seconds, microseconds) = await pipe.execute(raise_on_error=False)
        except exceptions.WatchError as error:
            raise StaleEpoch("another scheduler took over during a read") from error
    return FencedReply(tuple(map(_entries, replies)), seconds + microseconds / 1e6)


def _entries(reply: Any) -> list[Entry] | exceptions.ResponseError:
    if isinstance(reply, exceptions.ResponseError):
        return reply
    return list(reply[0][1]) if reply else []
