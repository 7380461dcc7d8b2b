"""Bounds in bytes and weights: what operators have set, else a share of the memory, or 1."""

from dataclasses import dataclass
from typing import cast

import redis.asyncio

from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.settings import EVERYONE, Setting, weights_of

#: Shares of ``maxmemory`` for the requests of unfinished jobs and for what ended jobs keep; the
#: rest is for token logs, pointers and a rewrite of the append-only file.
UNFINISHED_SHARE = 1 / 2
RESULTS_SHARE = 1 / 4

_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """0 means no bound; ``max_result_bytes`` is for ended jobs, ``max_bytes`` for all others."""

    max_bytes: int
    max_result_bytes: int


class TenantWeights:
    """A tenant's share beside others with 1: what the leader has read of it last."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}

    def __call__(self, tenant: str) -> float:
        """Return the weight of a tenant, 1 where nothing is set."""
        return self._weights.get(tenant, self._weights.get(EVERYONE, 1.0))

    async def refresh(self, client: redis.asyncio.Redis, keys: ShardKeys) -> None:
        """Read the weights again; only they are sent, however many settings there are."""
        found: dict[bytes, bytes] = {}
        cursor, names = 0, f"{Setting.WEIGHT}:*"
        while True:
            cursor, part = await client.hscan(keys.settings, cursor, names, _SCAN_COUNT)
            found |= cast(dict[bytes, bytes], part)
            if cursor == 0:
                break
        self._weights = weights_of(found)


def make_limits(max_bytes: bytes | None, max_result_bytes: bytes | None, maxmemory: int) -> Limits:
    """Return the bounds that two settings and the server's own limit amount to."""
    return Limits(
        _bound(max_bytes, round(maxmemory * UNFINISHED_SHARE)),
        _bound(max_result_bytes, round(maxmemory * RESULTS_SHARE)),
    )


async def read_limits(client: redis.asyncio.Redis, keys: ShardKeys) -> Limits:
    """Return the bounds that hold now."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.settings, "bytes", "result_bytes")
        pipe.info("memory")
        (max_bytes, max_result_bytes), memory = await pipe.execute()
    return make_limits(max_bytes, max_result_bytes, int(memory.get("maxmemory", 0)))


def _bound(setting: bytes | None, default: int) -> int:
    # As the functions do: what is no number is no setting.
    try:
        return max(0, int(float(setting or b"")))
    except (ValueError, OverflowError):
        return default
