"""Measures how fast jobs end and how durable the server is; submit answers from it."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, cast

import redis.asyncio
from redis import exceptions

from tidemill.protocol import calls
from tidemill.protocol.calls import Backlog, Measures
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker import Durability, durability_of
from tidemill_scheduler.health import Health
from tidemill_scheduler.limits import TenantWeights, read_limits
from tidemill_scheduler.policy.waiting_times import at_pace

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
#: How long a rate remembers; jobs of a minute must not look like a standstill between their ends.
MEMORY_SECONDS = 30.0

#: Counts of jobs, tokens and bytes that ended, and the rates measured from them.
_COUNTS = ("j", "t", "b")
_RATES = ("rj", "rt", "rb")


class Rate:
    """An exponentially weighted mean of events per second, unbiased from the first sample on."""

    def __init__(self, known: float = 0.0) -> None:
        self._sum = known
        self._weight = 1.0 if known else 0.0

    @property
    def per_second(self) -> float:
        """The rate, 0 before the first sample."""
        return self._sum / self._weight if self._weight else 0.0

    def update(self, num_events: int, seconds: float) -> None:
        """Take in what happened in the last ``seconds``."""
        share = 1.0 - math.exp(-seconds / MEMORY_SECONDS)
        self._sum += share * (num_events / seconds - self._sum)
        self._weight += share * (1.0 - self._weight)


class Meter:
    """Measures each second, in the place of the leader before it, and keeps ``weights`` fresh.

    ``backlog`` tells what waits, and a rate for as long as none was measured.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        health: Health,
        *,
        backlog: Callable[[], Backlog],
        weights: TenantWeights,
    ) -> None:
        self._client = client
        self._keys = keys
        self._health = health
        self._backlog = backlog
        self._weights = weights
        self._rates = [Rate() for _ in _RATES]
        # Jobs that end per second while others wait: what the workers can do, not what they are
        # asked for.
        self._pace = Rate()
        self._was_waiting = False
        self._counts: list[int] | None = None
        self._counted_at = 0.0
        self._is_hidden = False

    async def run(self) -> None:
        """Measure for ever."""
        await self._resume()
        info: dict[str, Any] = await self._client.info("server")
        run_id = str(info.get("run_id", ""))
        while True:
            await self._weights.refresh(self._client, self._keys)
            await self._count()
            await self._tell(run_id, await self._durability())
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def _resume(self) -> None:
        values = await self._client.hmget(self._keys.measures, *_RATES)
        self._rates = [Rate(_number(value)) for value in cast(list[bytes | None], values)]

    async def _count(self) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hmget(self._keys.measures, *_COUNTS)
            pipe.hget(self._keys.counters, "qb")
            values, unfinished_bytes = await pipe.execute()
        now, counts = time.monotonic(), [int(_number(value)) for value in values]
        # An idle system shows nothing of how fast it could be.
        if self._counts is not None and unfinished_bytes:
            for rate, count, before in zip(self._rates, counts, self._counts, strict=True):
                rate.update(max(0, count - before), now - self._counted_at)
        self._note_pace(counts[0], now)
        self._counts, self._counted_at = counts, now

    def _note_pace(self, num_ended: int, now: float) -> None:
        is_waiting = any(self._backlog().num_jobs_by_class)
        if self._counts is not None and is_waiting and self._was_waiting:
            self._pace.update(max(0, num_ended - self._counts[0]), now - self._counted_at)
        self._was_waiting = is_waiting

    async def _durability(self) -> Durability:
        if self._is_hidden:
            return "unknown"
        try:
            settings = await self._client.config_get("append*")
        except exceptions.ResponseError as error:
            _log.info("the broker does not tell how durable it is: %s", error)
            self._is_hidden = True  # managed servers forbid CONFIG; each try would be logged there
            return "unknown"
        return durability_of({str(name): str(value) for name, value in settings.items()})

    async def _tell(self, run_id: str, durability: Durability) -> None:
        limits = await read_limits(self._client, self._keys)
        jobs, tokens, num_bytes = (rate.per_second for rate in self._rates)
        backlog = at_pace(self._backlog(), self._pace.per_second)
        measures = Measures(jobs, tokens, num_bytes, limits.max_bytes, durability, run_id, backlog)
        await run_async(self._client, calls.measure(self._keys, measures))
        self._health.note_durability(durability)


def _number(value: bytes | None) -> float:
    try:
        number = float(value or 0)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
