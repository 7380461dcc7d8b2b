"""What the leading scheduler does about webhooks: it sees to it that each is delivered."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol, cast

import redis.asyncio
from redis import exceptions

from tidemill.protocol.calls import webhooks as calls
from tidemill.protocol.errors import BrokerUnavailable
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.config import WebhookConfig
from tidemill.service.runtime import crash_point
from tidemill_scheduler.tasks import end_tasks
from tidemill_webhooks import metrics
from tidemill_webhooks.config import delivery_settings, queue_url
from tidemill_webhooks.delivery import Deliverer
from tidemill_webhooks.outbox import Outbox
from tidemill_webhooks.rq_jobs import HookQueue

_log = logging.getLogger(__name__)

#: Nobody rings for an end that somebody wants to hear of, so the outbox is looked at this often.
_POLL_SECONDS = 0.25
#: Due deliveries that are looked at in one go, and attempts that run here at once.
_PAGE_SIZE = 64
MAX_AT_ONCE = 32

#: How long a queue may take for an attempt that was left to it.
HAND_MS = 30_000
#: So often an attempt is left to a queue; then it is made here, for the queue seems to lose it.
MAX_HANDS = 2


class Queue(Protocol):
    """A queue that other processes work off."""

    def put(self, shard: str, delivery_id: str, attempts: int, hands: int) -> None:
        """Leave an attempt to it, once for the same arguments; raises ``BrokerUnavailable``."""

    def close(self) -> None:
        """Close its connection, which a later ``put`` opens again."""


@dataclass(frozen=True, slots=True)
class _Due:
    delivery_id: str
    attempts: int
    hands: int


class Courier:
    """Works off the outbox and the index of deliveries of one shard.

    Attempts are left to ``queue`` while there are processes that work it off, and made here
    otherwise, or where the queue seems to lose them.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        deliverer: Deliverer,
        queue: Queue | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._deliverer = deliverer
        self._queue = queue
        self._outbox = Outbox(client, keys)
        self._running: dict[str, asyncio.Task[str]] = {}

    @property
    def num_running(self) -> int:
        """Attempts that run here."""
        return len(self._running)

    async def run(self) -> None:
        """Deliver for ever.  Raises what redis-py raises when the broker is away."""
        try:
            while True:
                if not await self.turn():
                    await self._rest()
        finally:
            await end_tasks(self._running.values())
            self._running.clear()
            if self._queue is not None:
                self._queue.close()

    async def turn(self) -> int:
        """Look once; returns how much was begun."""
        self._collect()
        num_events = await self._outbox.work_off()
        return num_events + await self._start_due()

    async def _rest(self) -> None:
        if not self._running:
            await asyncio.sleep(_POLL_SECONDS)
            return
        await asyncio.wait(
            self._running.values(), timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )

    def _collect(self) -> None:
        for delivery_id, task in list(self._running.items()):
            if task.done():
                del self._running[delivery_id]
                _check(delivery_id, task)

    async def _start_due(self) -> int:
        room = MAX_AT_ONCE - len(self._running)
        if room <= 0:
            return 0
        seconds, micros = await self._client.time()
        now_ms = seconds * 1000 + micros // 1000
        async with self._client.pipeline(transaction=False) as pipe:
            # Those that run here are still due if their lease is short.
            number = min(_PAGE_SIZE, room) + len(self._running)
            pipe.zrangebyscore(self._keys.due_deliveries, "-inf", now_ms, start=0, num=number)
            pipe.zcount(self._keys.hook_workers, now_ms, "+inf")
            pipe.zcard(self._keys.due_deliveries)
            found, num_workers, num_pending = await pipe.execute()
        metrics.PENDING.set(num_pending)
        metrics.WORKERS.set(num_workers)
        ids = [raw.decode() for raw in cast(list[bytes], found)]
        fresh = [one for one in ids if one not in self._running][:room]
        return await self._start(fresh, has_workers=num_workers > 0) if fresh else 0

    async def _start(self, ids: list[str], *, has_workers: bool) -> int:
        for due in await self._details(ids):
            is_left = has_workers and due.hands < MAX_HANDS and await self._hand(due)
            if not is_left:
                attempt = self._deliverer.attempt(due.delivery_id)
                self._running[due.delivery_id] = asyncio.create_task(attempt)
        return len(ids)

    async def _details(self, ids: list[str]) -> list[_Due]:
        async with self._client.pipeline(transaction=False) as pipe:
            for delivery_id in ids:
                pipe.hmget(self._keys.delivery(delivery_id), "at", "hn")
            rows = await cast(Awaitable[list[list[bytes | None]]], pipe.execute())
        return [
            _Due(delivery_id, int(attempts or 0), int(hands or 0))
            for delivery_id, (attempts, hands) in zip(ids, rows, strict=True)
        ]

    async def _hand(self, due: _Due) -> bool:
        if self._queue is None:
            return False
        crash_point("webhooks.before_enqueue")
        try:
            await asyncio.to_thread(
                self._queue.put, self._keys.shard, due.delivery_id, due.attempts, due.hands
            )
        except BrokerUnavailable as error:
            _log.warning("the queue of webhooks is away, delivering here: %s", error.one_line())
            return False
        crash_point("webhooks.after_enqueue")
        # After the enqueueing: who dies in between leaves two, of which one finds nothing to do.
        handed = calls.hand_delivery(
            self._keys,
            delivery_id=due.delivery_id,
            attempts=due.attempts,
            hands=due.hands,
            wait_ms=HAND_MS,
        )
        if await run_async(self._client, handed):
            metrics.HANDED.inc()
        return True


def _check(delivery_id: str, task: asyncio.Task[str]) -> None:
    try:
        task.result()
    except exceptions.ResponseError as error:
        # What is wrong with one delivery must not hold up the others.
        _log.warning("%s waits, the broker refuses: %s", delivery_id, error)


def make_courier(
    client: redis.asyncio.Redis,
    keys: ShardKeys,
    redis_url: str,
    config: WebhookConfig,
    *,
    allow_private: bool,
) -> Courier:
    """Return the courier of a leader; raises ``ConfigError`` for a secret that is none."""
    settings = delivery_settings(config, allow_private=allow_private)
    url = queue_url(config, redis_url)
    queue = HookQueue(url) if url is not None else None
    return Courier(client, keys, Deliverer(client, keys, settings), queue)
