"""The server's clock, the only one that leases and heartbeats are measured with."""

import time

import redis.asyncio

from tidemill_scheduler.fleet.grace import Moment


async def server_ms(client: redis.asyncio.Redis) -> int:
    """Return the server's time in ms."""
    seconds, microseconds = await client.time()
    return seconds * 1000 + microseconds // 1000


async def this_moment(client: redis.asyncio.Redis) -> Moment:
    """Return the time by the server's clock, and by ours when its answer came."""
    seconds, microseconds = await client.time()
    return Moment(time.monotonic(), seconds + microseconds / 1e6)
