"""Forgets ended jobs: those whose time is over, and the oldest where they take too much."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import cast

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys
from tidemill_scheduler import metrics
from tidemill_scheduler.clock import server_ms
from tidemill_scheduler.upkeep.limits import read_limits

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
#: Jobs that one call forgets.
MAX_TRIMMED = 128
#: A job that ended so lately stays, whatever it takes: somebody may still repeat the submission of
#: which the reply was lost, and without the job it would run again.
YOUNG_SECONDS = 60.0
#: Jobs that one look for old ones passes over, in calls: where more are young, time helps.
_MAX_PAGES = 8


class Retention:
    """Keeps the account of what ended jobs take, and within its bound."""

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys) -> None:
        self._client = client
        self._keys = keys

    async def run(self) -> None:
        """Forget for ever."""
        while True:
            await self.settle_expired()
            limits = await read_limits(self._client, self._keys)
            if limits.max_result_bytes:
                await self.trim_to(limits.max_result_bytes)
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def settle_expired(self) -> None:
        """Take the jobs off the account whose keys the server has expired by itself."""
        now = await server_ms(self._client)
        while members := await self._oldest("-inf", now):
            await self._trim(members, "expired")

    async def trim_to(self, max_bytes: int) -> None:
        """Forget the oldest jobs until the others take ``max_bytes`` at most, but no young ones."""
        while (excess := await self._kept_bytes() - max_bytes) > 0:
            members = _first_of_size(excess, await self._oldest_to_trim())
            if not await self._trim(members, "bytes"):
                return  # none is left but young ones, or another scheduler was faster

    async def _oldest_to_trim(self) -> list[str]:
        """Return the first jobs that are not young; those that are kept longer come later."""
        for page in range(_MAX_PAGES):
            members = await self._oldest("-inf", "+inf", start=page * MAX_TRIMMED)
            if not members or (old := await self._without_young(members)):
                return old if members else []
        return []

    async def _without_young(self, members: Sequence[str]) -> list[str]:
        young_since = await server_ms(self._client) - YOUNG_SECONDS * 1000
        async with self._client.pipeline(transaction=False) as pipe:
            for member in members:
                pipe.hget(self._keys.job(calls.job_of(member)), "te")
            ended = cast(list[bytes | None], await pipe.execute())
        return [m for m, ms in zip(members, ended, strict=True) if _number(ms) <= young_since]

    async def _kept_bytes(self) -> int:
        return int(await self._client.hget(self._keys.counters, "rb") or 0)

    async def _oldest(self, low: str, high: str | int, start: int = 0) -> list[str]:
        members = await self._client.zrangebyscore(
            self._keys.ended, low, high, start=start, num=MAX_TRIMMED
        )
        return [member.decode("utf-8", "replace") for member in cast(list[bytes], members)]

    async def _trim(self, members: Sequence[str], reason: str) -> int:
        call = calls.trim(self._keys, await self._with_refs(members))
        num_trimmed = await run_async(self._client, call)
        metrics.TRIMMED.labels(reason).inc(num_trimmed)
        return num_trimmed

    async def _with_refs(self, members: Sequence[str]) -> list[tuple[str, JobRef]]:
        job_ids = [calls.job_of(member) for member in members]
        async with self._client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(self._keys.job(job_id), REF_FIELDS)
            refs = map(JobRef.read, job_ids, await pipe.execute())
        return list(zip(members, refs, strict=True))


def _number(value: bytes | None) -> int:
    return int(value) if value and value.isdigit() else 0


def _first_of_size(num_bytes: int, members: Iterable[str]) -> list[str]:
    """Return as many of the ``ended`` index's first members as take ``num_bytes`` together."""
    found: list[str] = []
    for member in members:
        if num_bytes <= 0:
            break
        found.append(member)
        num_bytes -= int(member.partition(" ")[0])
    return found
