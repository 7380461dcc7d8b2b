"""A producer without the SDK: any Redis client at the front door."""

import json
from typing import Any

import redis
import redis.asyncio

from chaos.plan import JobPlan
from tidemill.protocol.keys import ShardKeys

_ANSWER_SECONDS = 4
_TIMEOUT_SECONDS = _ANSWER_SECONDS + 1.0


class RawProducer:
    """Puts jobs at the front door and waits for the answers."""

    def __init__(self, url: str) -> None:
        self._client = redis.asyncio.Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS
        )
        self._keys = ShardKeys()

    async def submit(self, job: JobPlan) -> dict[str, Any] | None:
        """Return the answer, or None if there is none: then nobody knows what became of it."""
        entry = {"v": "1", "body": json.dumps(body_of(job))}
        try:
            entry_id = await self._client.xadd(self._keys.front_door, entry)
            reply_key = self._keys.front_reply(entry_id.decode())
            reply = await self._client.blpop([reply_key], timeout=_ANSWER_SECONDS)
        except redis.RedisError:
            return None
        return None if reply is None else json.loads(reply[1])

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def body_of(job: JobPlan) -> dict[str, Any]:
    """A job as the front door takes it."""
    times = {
        "delay_ms": job.delay,
        "deadline_ms": job.deadline,
        "max_queue_ms": job.max_queue,
        "stall_ms": job.stall,
    }
    terms: dict[str, Any] = {name: round(1000 * value) for name, value in times.items() if value}
    if job.batch:
        terms["batch"] = job.batch
    params = {"max_tokens": job.num_tokens, "temperature": 0.0, "ignore_eos": True}
    request = {
        "model": "m",
        "prompt_ids": job.prompt,
        "params": params,
        "tenant": job.tenant,
        "priority": job.priority,
        "stream": job.stream,
    }
    return {"request": request, "terms": terms, "idempotency_key": job.key}
