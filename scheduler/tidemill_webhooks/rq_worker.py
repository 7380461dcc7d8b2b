"""A process that works off the queue of attempts, as long as it says that it is there."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import redis.asyncio

from tidemill.protocol.calls import webhooks as calls
from tidemill.protocol.errors import BrokerError
from tidemill.protocol.functions import ensure_library, run
from tidemill.protocol.keys import ShardKeys
from tidemill.service.redis import connect, connect_async, translate
from tidemill_webhooks.config import WorkerConfig
from tidemill_webhooks.delivery import Deliverer

_log = logging.getLogger(__name__)

PRESENCE_MS = 15_000
BEAT_SECONDS = 5.0


class Presence:
    """Says on every shard that a worker is there; a context manager that says goodbye."""

    def __init__(self, url: str, shards: Sequence[str], worker_id: str) -> None:
        self._url = url
        self._shards = shards
        self._worker_id = worker_id
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook-presence", daemon=True)

    def __enter__(self) -> Self:
        for shard in self._shards:
            with translate(), connect(self._url, shard=shard) as client:
                ensure_library(client)
        self._tell(PRESENCE_MS)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leaving.set()
        self._thread.join()
        self._tell(0)

    def _run(self) -> None:
        while not self._leaving.wait(BEAT_SECONDS):
            self._tell(PRESENCE_MS)

    def _tell(self, ttl_ms: int) -> None:
        for shard in self._shards:
            keys = ShardKeys(shard)
            try:
                with translate(), connect(self._url, shard=shard) as client:
                    run(client, calls.serve_hooks(keys, worker_id=self._worker_id, ttl_ms=ttl_ms))
            except BrokerError as error:
                # Without it the leader delivers by itself.
                _log.warning("cannot say that this worker is there: %s", error.one_line())


class Runtime:
    """An event loop with a connection to each shard, for attempts that are made one by one."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner()
        self._clients: dict[str, redis.asyncio.Redis] = {}

    def attempt(self, shard: str, delivery_id: str) -> str:
        """Make an attempt; returns the delivery's state, or why it was not tried."""
        with translate():
            return self._runner.run(self._attempt(shard, delivery_id))

    async def _attempt(self, shard: str, delivery_id: str) -> str:
        client = self._clients.get(shard)
        if client is None:
            client = connect_async(self._config.redis_url, shard=shard)
            self._clients[shard] = client
        deliverer = Deliverer(client, ShardKeys(shard), self._config.delivery)
        return await deliverer.attempt(delivery_id)

    def close(self) -> None:
        """Close the connections and the loop."""
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


class _Process:
    """What the jobs of this process run with; RQ gives them nothing but their arguments."""

    runtime: Runtime | None = None


def use_runtime(runtime: Runtime | None) -> None:
    """Let the jobs of this process run with ``runtime``."""
    _Process.runtime = runtime


def deliver(shard: str, delivery_id: str) -> str:
    """Make an attempt; the one function that jobs of the queue name."""
    assert _Process.runtime is not None, "this process is no worker of webhooks"
    return _Process.runtime.attempt(shard, delivery_id)
