"""Deletes function libraries of older versions that no process uses any more."""

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import Any, cast

import redis.asyncio
from redis import exceptions

from tidemill.protocol.functions import LIBRARY
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.library import VERSION, library_name
from tidemill.service.config import MAX_SHARDS
from tidemill_scheduler.clock import server_ms

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 3600.0
#: A library that nobody has announced may have been loaded a moment ago.
_GRACE_MS = 24 * 3600 * 1000

_NAME = re.compile(r"tm([1-9]\d{0,8})")


def older_libraries(names: Iterable[str]) -> list[str]:
    """Return those of the names that are libraries of versions before ours."""
    matches = filter(None, map(_NAME.fullmatch, names))
    return [library_name(number) for m in matches if (number := int(m.group(1))) < VERSION]


class Libraries:
    """Looks after the libraries of a server, which all its shards share."""

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys) -> None:
        self._client = client
        self._keys = keys
        self._may_delete = True

    async def run(self) -> None:
        """Delete what is not in use, for ever or until that is found to be forbidden."""
        while True:
            await self.delete_unused()
            if not self._may_delete:
                return
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def delete_unused(self) -> None:
        """Delete the older libraries whose last announcement has run out on every shard."""
        now = await server_ms(self._client)
        for library in older_libraries(await self._loaded()):
            announced_until = await self._announced_until(library)
            if announced_until is None:
                until = {library: now + _GRACE_MS}
                await self._client.zadd(self._keys.libraries, until, nx=True)
            elif announced_until < now:
                await self._delete(library)

    async def _loaded(self) -> list[str]:
        # redis-py leaves the reply untyped.
        listed: Any = await cast(Any, self._client.function_list(library="tm*"))
        return [_text(_field(library, b"library_name")) for library in listed]

    async def _announced_until(self, library: str) -> float | None:
        async with self._client.pipeline(transaction=False) as pipe:
            for number in range(MAX_SHARDS):
                pipe.zscore(ShardKeys(f"{number:02x}").libraries, library)
            # In a cluster another node holds some of the shards, and libraries of its own.
            scores = await pipe.execute(raise_on_error=False)
        return max((score for score in scores if isinstance(score, float)), default=None)

    async def _delete(self, library: str) -> None:
        try:
            await cast(Any, self._client.function_delete(library))
        except exceptions.NoPermissionError:
            self._may_delete = False
            _log.warning("the library %s is not used any more; delete it as a deployer", library)
        else:
            _log.info("deleted the function library %s, which %s replaces", library, LIBRARY)


def _field(library: Any, name: bytes) -> Any:
    if isinstance(library, dict):
        return {_text(key): value for key, value in library.items()}[name.decode()]
    return library[library.index(name) + 1]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
