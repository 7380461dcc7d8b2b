"""Takes waiting jobs in: woken by the bell, and by a sweep for what the bell did not tell."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import redis.asyncio

from tidemill.protocol.keys import ShardKeys
from tidemill_scheduler.intake.ingress import Ingress
from tidemill_scheduler.intake.jobs import WaitingJob, is_queue_name
from tidemill_scheduler.intake.tokenize_pool import TokenizePool
from tidemill_scheduler.policy.scheduler import Scheduler

#: Pub/sub loses messages, so all queues are looked at this often whatever the bell says.
SWEEP_SECONDS = 1.0
#: Jobs kept in memory, tokenised or not; what is beyond waits on its stream.
MAX_WAITING = 1_000_000


class Intake:
    """Reads all queues into the scheduler's order, or into the pool that tokenises text first.

    ``arrived`` is called when jobs came, ``swept`` awaited at each sweep.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        ingress: Ingress,
        scheduler: Scheduler,
        pool: TokenizePool,
        *,
        arrived: Callable[[], None],
        swept: Callable[[], Awaitable[None]],
    ) -> None:
        self._client = client
        self._keys = keys
        self._ingress = ingress
        self._scheduler = scheduler
        self._pool = pool
        self._arrived = arrived
        self._swept = swept
        self._rung = asyncio.Event()
        self._rung_queues: set[str] = set()

    async def listen(self) -> None:
        """Follow the bell for ever."""
        async with self._client.pubsub() as pubsub:
            await pubsub.ssubscribe(self._keys.bell)
            while True:
                message = await pubsub.get_message(
                    ignore_subscribe_messages=True, timeout=SWEEP_SECONDS
                )
                queue = message["data"].decode("utf-8", "replace") if message else ""
                if is_queue_name(queue):
                    self._rung_queues.add(queue)
                    self._rung.set()

    async def run(self) -> None:
        """Take jobs in for ever.  Raises ``StaleEpoch``."""
        # Queues that may hold more; all get their turn, so that a long one holds nobody up.
        queues: set[str] = set()
        next_sweep = 0.0
        while True:
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + SWEEP_SECONDS
                queues |= await self._sweep()
            queues |= self._rung_queues
            self._rung_queues.clear()
            queues = await self._read(sorted(queues))
            if not queues:
                await self._wait_for_bell(next_sweep)

    async def _sweep(self) -> set[str]:
        await self._swept()
        queues = await self._ingress.active_queues()
        await self._ingress.retire(queues)
        return set(queues)

    async def _read(self, queues: list[str]) -> set[str]:
        num_waiting = self._scheduler.num_waiting + self._pool.num_waiting
        if not queues or num_waiting >= MAX_WAITING:
            return set()
        jobs = await self._ingress.read(queues)
        for job in jobs:
            await self._accept(job)
        if jobs:
            self._arrived()
        return {job.queue for job in jobs}

    async def _accept(self, job: WaitingJob) -> None:
        if not job.is_tokenized:
            self._pool.put(job)
            return
        older = self._scheduler.add_job(job)
        if older is not None:
            await self._ingress.acknowledge(older.queue, older.entry_id)

    async def _wait_for_bell(self, next_sweep: float) -> None:
        self._rung.clear()
        if self._rung_queues:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, next_sweep - time.monotonic())):
                await self._rung.wait()
