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
from tidemill_scheduler.fleet.rates import Pace, Rate
from tidemill_scheduler.health import Health
from tidemill_scheduler.policy.waiting_times import at_pace
from tidemill_scheduler.upkeep.limits import TenantWeights, read_limits

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0

#: Counts of jobs, tokens and bytes that workers brought to their end, and their rates.
_COUNTS = ("j", "t", "b")
_RATES = ("rj", "rt", "rb")


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
        self._pace = Pace()
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
        values = await self._client.hmget(self._keys.measures, *_RATES, "rp")
        *rates, pace = map(_number, cast(list[bytes | None], values))
        self._rates, self._pace = list(map(Rate, rates)), Pace(pace)

    async def _count(self) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hmget(self._keys.measures, *_COUNTS)
            pipe.hget(self._keys.counters, "qb")
            pipe.zcard(self._keys.running)
            values, unfinished_bytes, num_running = await pipe.execute()
        now, counts = time.monotonic(), [int(_number(value)) for value in values]
        if self._counts is not None:
            ended = [max(0, n - old) for n, old in zip(counts, self._counts, strict=True)]
            seconds = now - self._counted_at
            # An idle system shows nothing of how fast it could be.
            if unfinished_bytes or any(ended):
                for rate, num_ended in zip(self._rates, ended, strict=True):
                    rate.update(num_ended, seconds)
            is_waiting = any(self._backlog().num_jobs_by_class)
            self._pace.note(ended[0], num_running, seconds, is_waiting=is_waiting)
        self._counts, self._counted_at = counts, now

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
        pace, mean_tokens = self._pace.per_second, tokens / jobs if jobs else 0.0
        backlog = at_pace(self._backlog(), pace, mean_tokens)
        measures = Measures(
            jobs, tokens, num_bytes, limits.max_bytes, durability, run_id, backlog, pace
        )
        await run_async(self._client, calls.measure(self._keys, measures))
        self._health.note_durability(durability)


def _number(value: bytes | None) -> float:
    try:
        number = float(value or 0)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
