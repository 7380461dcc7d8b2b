"""The right to lead a shard: a lease with a term number."""

import asyncio
import logging
import time

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import crash_point
from tidemill_scheduler.presence import Presence

_log = logging.getLogger(__name__)

#: The lease is renewed this many times while it lasts; a standby asks more often.
_RENEWALS = 3
_STANDBY_TRIES = 10
_MAX_PAUSE_SECONDS = 0.25


class Leadership:
    """One scheduler's claim to lead; ``epoch`` is 0 while it does not."""

    def __init__(
        self, client: redis.asyncio.Redis, keys: ShardKeys, scheduler_id: str, lease_seconds: float
    ) -> None:
        self._client = client
        self._keys = keys
        self._id = scheduler_id
        self._lease_seconds = lease_seconds
        self.epoch = 0

    async def acquire(self) -> int:
        """Wait, as a standby, until the lease is ours; returns the epoch."""
        presence = Presence(self._client, self._keys)
        pause = min(self._lease_seconds / _STANDBY_TRIES, _MAX_PAUSE_SECONDS)
        while not (epoch := await self._lead()):
            await presence.check()
            await asyncio.sleep(pause)
        crash_point("scheduler.after_lead")
        self.epoch = epoch
        _log.info("leading shard %s in epoch %d", self._keys.shard, epoch)
        return epoch

    async def hold(self) -> None:
        """Renew the lease for ever; raises ``StaleEpoch`` once it is not ours."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS)
            asked_at = time.monotonic()
            late = asked_at - renewed_at > self._lease_seconds
            if await self._lead() != self.epoch:
                raise StaleEpoch(f"epoch {self.epoch} of shard {self._keys.shard} is over")
            if late:
                _log.warning("the leader's lease was renewed late, but nobody took it")
            renewed_at = asked_at

    async def _lead(self) -> int:
        lease_ms = round(self._lease_seconds * 1000)
        return await run_async(
            self._client, calls.lead(self._keys, scheduler_id=self._id, lease_ms=lease_ms)
        )
