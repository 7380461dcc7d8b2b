"""Keeps a batch runner for as long as there are batches, as a process of its own."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import redis.asyncio

from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import ParentLink

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_FIRST = 0.1
_MAX_PAUSE_SECONDS = 30.0
#: A process that lived for less has failed at once.
_SHORT = 10.0
_DRAIN_SECONDS = 5.0


class BatchKeeper:
    """A duty of the leader; the leases of batches keep two leaders' runners apart."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        *,
        url: str,
        blob_url: str,
        options: Sequence[str] = (),
    ) -> None:
        self._client, self._keys = client, keys
        self._url, self._blob_url, self._options = url, blob_url, options
        self._pause = _FIRST

    async def run(self) -> None:
        """Keep it for ever."""
        link = ParentLink()
        try:
            while True:
                while not await self._client.zcard(self._keys.active_batches):
                    await asyncio.sleep(_POLL_SECONDS)
                await self._keep(link)
        finally:
            link.close()

    async def _keep(self, link: ParentLink) -> None:
        """Run it once, to its end."""
        process, started = self._start(link), time.monotonic()
        try:
            while (status := process.poll()) is None:
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            # Its batches' leases are given up before somebody else's runner asks for them.
            await asyncio.shield(asyncio.to_thread(_end, process))
        if status:
            _log.warning("the batch runner ended with status %d", status)
            # One that ends as soon as it starts is started less and less often.
            lived = time.monotonic() - started
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS) if lived < _SHORT else _FIRST
            await asyncio.sleep(self._pause)

    def _start(self, link: ParentLink) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidemill_scheduler.batches", *self._options],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                **link.environment,
                "TIDEMILL_REDIS_URL": self._url,
                "TIDEMILL_SHARD": self._keys.shard,
                "TIDEMILL_BLOB_URL": self._blob_url,
            },
            pass_fds=link.pass_fds,
        )
        _log.info("started the batch runner, pid %d", process.pid)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_DRAIN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
