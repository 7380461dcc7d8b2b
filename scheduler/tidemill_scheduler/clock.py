"""The server's clock, the only one that leases and heartbeats are measured with."""

import redis.asyncio


async def server_ms(client: redis.asyncio.Redis) -> int:
    """Return the server's time in ms."""
    seconds, microseconds = await client.time()
    return seconds * 1000 + microseconds // 1000
