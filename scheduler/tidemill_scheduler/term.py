"""One term of a leader: everything it knows is built at its start and dropped at its end."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import redis.asyncio

from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.functions import run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.redis import translate
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers
from tidemill_scheduler import metrics
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.dispatcher import Dispatcher
from tidemill_scheduler.grace import Grace
from tidemill_scheduler.health import Health
from tidemill_scheduler.ingress import Ingress
from tidemill_scheduler.job_life import JobLife
from tidemill_scheduler.jobs import WaitingJob, is_queue_name
from tidemill_scheduler.leadership import Leadership
from tidemill_scheduler.reaper import Reaper
from tidemill_scheduler.refusal import refuse
from tidemill_scheduler.scheduler import Scheduler
from tidemill_scheduler.tasks import run_together
from tidemill_scheduler.tokenize_pool import TokenizePool
from tidemill_scheduler.worker_watch import WorkerWatch

#: Pub/sub loses messages, so all queues are looked at this often whatever the bell says.
_TICK_SECONDS = 1.0
#: Jobs kept in memory, tokenised or not; what is beyond waits on its stream.
MAX_WAITING = 1_000_000


class Term:
    """Wires the parts together and runs them until one fails."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        config: SchedulerConfig,
        leadership: Leadership,
        tokenizers: AsyncRedisTokenizers,
        health: Health,
        grace: Grace,
    ) -> None:
        self._client = client
        self._keys = keys
        self._health = health
        self._lease_seconds = config.lease_seconds
        self._leadership = leadership
        self._scheduler = Scheduler(silent_seconds=config.lease_seconds * config.silent_share)
        self._ingress = Ingress(client, keys, leadership.epoch)
        self._watch = WorkerWatch(client, keys, self._scheduler, self._wake_dispatch)
        self._reaper = Reaper(client, keys, grace, config.lease_seconds)
        self._job_life = JobLife(client, keys, self._scheduler.forget)
        self._dispatcher = Dispatcher(
            client, keys, self._scheduler, epoch=leadership.epoch, lease_ms=config.lease_ms
        )
        self._pool = TokenizePool(
            client,
            keys,
            tokenizers,
            self._place,
            unknown_model_seconds=config.unknown_model_seconds,
        )
        self._dispatchable = asyncio.Event()
        self._rung = asyncio.Event()
        self._rung_queues: set[str] = set()

    async def run(self) -> None:
        """Lead.

        Raises ``StaleEpoch`` once another scheduler leads, ``BrokerUnavailable`` once the broker
        is away or was replaced.
        """
        duties = (
            self._leadership.hold(),
            self._watch.run(),
            self._watch.follow_statuses(),
            self._listen(),
            self._take_in(),
            self._give_out(),
            self._pool.run(),
            self._reaper.run(),
            self._job_life.run(),
        )
        await run_together(_translated(duty) for duty in duties)

    async def _listen(self) -> None:
        async with self._client.pubsub() as pubsub:
            await pubsub.ssubscribe(self._keys.bell)
            while True:
                message = await pubsub.get_message(
                    ignore_subscribe_messages=True, timeout=_TICK_SECONDS
                )
                queue = message["data"].decode("utf-8", "replace") if message else ""
                if is_queue_name(queue):
                    self._rung_queues.add(queue)
                    self._rung.set()

    async def _take_in(self) -> None:
        # Queues that may hold more; all get their turn, so that a long one holds nobody up.
        queues: set[str] = set()
        next_sweep = 0.0
        while True:
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + _TICK_SECONDS
                queues |= await self._sweep()
            queues |= self._rung_queues
            self._rung_queues.clear()
            queues = await self._read(sorted(queues))
            if not queues:
                await self._wait_for_bell(next_sweep)

    async def _sweep(self) -> set[str]:
        self._health.beat()
        # Nobody else would notice that a worker fell silent.
        self._wake_dispatch()
        await self._refuse_hopeless()
        queues = await self._ingress.active_queues()
        await self._ingress.retire(queues)
        return set(queues)

    async def _refuse_hopeless(self) -> None:
        # A worker that lives is registered within a lease.
        hopeless = self._scheduler.take_hopeless(time.monotonic(), self._lease_seconds)
        if not hopeless:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for job, _ in hopeless:
                pipe.hmget(self._keys.job(job.job_id), REF_FIELDS)
            values = await pipe.execute()
        batch = [
            refuse(self._keys, JobRef.read(job.job_id, reference), _too_large(job, capacity))
            for (job, capacity), reference in zip(hopeless, values, strict=True)
        ]
        await run_many_async(self._client, batch)

    async def _read(self, queues: list[str]) -> set[str]:
        num_waiting = self._scheduler.num_waiting + self._pool.num_waiting
        if not queues or num_waiting >= MAX_WAITING:
            return set()
        jobs = await self._ingress.read(queues)
        for job in jobs:
            await self._accept(job)
        if jobs:
            self._wake_dispatch()
        return {job.queue for job in jobs}

    async def _accept(self, job: WaitingJob) -> None:
        if not job.is_tokenized:
            self._pool.put(job)
            return
        older = self._scheduler.add_job(job)
        if older is not None:
            await self._ingress.acknowledge(older.queue, older.entry_id)

    def _place(self, job: WaitingJob) -> None:
        self._scheduler.add_job(job)
        self._wake_dispatch()

    async def _wait_for_bell(self, next_sweep: float) -> None:
        self._rung.clear()
        if self._rung_queues:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, next_sweep - time.monotonic())):
                await self._rung.wait()

    def _wake_dispatch(self) -> None:
        self._dispatchable.set()

    async def _give_out(self) -> None:
        while True:
            await self._dispatchable.wait()
            self._dispatchable.clear()
            with metrics.TICK_SECONDS.time():
                dispatches = self._scheduler.tick(time.monotonic())
            num_sent = 0
            if dispatches:
                self._health.note_work(runnable=True, num_dispatched=0)
                num_sent = await self._dispatcher.send(dispatches)
            if dispatches or self._scheduler.is_unfinished:
                # There may be more: a tick is bounded, and refused dispatches gave credit back.
                self._wake_dispatch()
            runnable = self._scheduler.is_runnable(time.monotonic())
            self._health.note_work(runnable=runnable, num_dispatched=num_sent)
            metrics.WAITING_JOBS.set(self._scheduler.num_waiting)


def _too_large(job: WaitingJob, capacity: int) -> InvalidRequest:
    return InvalidRequest(
        f"prompt: {job.cost} tokens are more than any worker of model {job.model!r} can hold;"
        f" the largest KV cache holds {capacity}",
        field="prompt",
        fix="Shorten the prompt, or give a worker more memory.",
    )


async def _translated(duty: Coroutine[Any, Any, None]) -> None:
    with translate():
        await duty
