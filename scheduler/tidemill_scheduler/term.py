"""One term of a leader: everything it knows is built at its start and dropped at its end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import redis.asyncio

from tidemill.protocol.keys import ShardKeys
from tidemill.service.redis import translate
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers
from tidemill_scheduler.batches.duties import batch_duties
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.dispatcher import Dispatcher
from tidemill_scheduler.fleet.grace import Grace
from tidemill_scheduler.fleet.measures import Meter
from tidemill_scheduler.fleet.reaper import Reaper
from tidemill_scheduler.fleet.worker_watch import WorkerWatch
from tidemill_scheduler.health import Health
from tidemill_scheduler.intake.front_door import FrontDoor
from tidemill_scheduler.intake.front_submitter import FrontSubmitter
from tidemill_scheduler.intake.ingress import Ingress
from tidemill_scheduler.intake.intake import Intake
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.intake.tokenize_pool import TokenizePool
from tidemill_scheduler.leadership import Leadership
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings
from tidemill_scheduler.tasks import run_together
from tidemill_scheduler.upkeep.audit import Audit
from tidemill_scheduler.upkeep.hopeless import Judge
from tidemill_scheduler.upkeep.job_life import JobLife
from tidemill_scheduler.upkeep.libraries import Libraries
from tidemill_scheduler.upkeep.limits import TenantWeights
from tidemill_scheduler.upkeep.retention import Retention
from tidemill_scheduler.upkeep.upkeep import keep_up
from tidemill_webhooks.courier import make_courier


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
        self._config = config
        self._health = health
        self._leadership = leadership
        self._fleet_known = asyncio.Event()
        self._weights = TenantWeights()
        self._scheduler = Scheduler(
            silent_seconds=config.lease_seconds * config.silent_share,
            age_seconds=config.age_seconds,
            settings=PolicySettings(order=config.policy),
            weight_of=self._weights,
        )
        self._dispatcher = Dispatcher(
            client, keys, self._scheduler, health, epoch=leadership.epoch, lease_ms=config.lease_ms
        )
        self._watch = WorkerWatch(client, keys, self._scheduler, self._dispatcher.wake)
        self._judge = Judge(
            client,
            keys,
            self._scheduler,
            self._watch.refresh,
            epoch=leadership.epoch,
            # A worker that lives is registered within a lease.
            patience_seconds=config.lease_seconds,
        )
        self._pool = TokenizePool(
            client,
            keys,
            tokenizers,
            self._place,
            epoch=leadership.epoch,
            unknown_model_seconds=config.unknown_model_seconds,
        )
        ingress = Ingress(client, keys, leadership.epoch)
        self._intake = Intake(
            client,
            keys,
            ingress,
            self._scheduler,
            self._pool,
            arrived=self._dispatcher.wake,
            swept=self._look_around,
        )
        submitter = FrontSubmitter(
            client,
            keys,
            lambda: self._scheduler.models,
            config.unknown_model_seconds,
            epoch=leadership.epoch,
        )
        self._front_door = FrontDoor(client, keys, leadership.epoch, submitter)
        self._reaper = Reaper(client, keys, grace, config.lease_seconds)
        self._job_life = JobLife(client, keys, grace, self._scheduler.forget)
        self._audit = Audit(client, keys, self._scheduler, ingress)
        self._retention = Retention(client, keys)
        self._meter = Meter(
            client, keys, health, backlog=self._scheduler.backlog, weights=self._weights
        )
        self._libraries = Libraries(client, keys)
        self._batches = batch_duties(client, keys, config)
        self._courier = make_courier(
            client,
            keys,
            config.redis_url,
            config.webhooks,
            allow_private=config.allow_private_webhooks,
        )

    async def run(self) -> None:
        """Lead.

        Raises ``StaleEpoch`` once another scheduler leads, ``BrokerUnavailable`` once the broker
        is away or was replaced.
        """
        with translate():
            await self._reaper.begin()
            # Before the first jobs are shared out.
            await self._weights.refresh(self._client, self._keys)
        duties = (
            self._leadership.hold(),
            self._watch.run(),
            self._watch.follow_statuses(),
            self._judge.run(),
            self._intake.listen(),
            self._take_in(),
            self._front_door.run(),
            self._pool.run(),
            self._dispatch(),
            self._reaper.run(),
            self._job_life.run(),
            keep_up(self._audit.run),
            keep_up(self._retention.run),
            keep_up(self._meter.run),
            keep_up(self._libraries.run),
            keep_up(self._courier.run),
            *map(keep_up, self._batches),
        )
        await run_together(_translated(duty) for duty in duties)

    async def _dispatch(self) -> None:
        await self._fleet_known.wait()
        await self._dispatcher.run()

    async def _take_in(self) -> None:
        # All that is known of the workers, before the first job is bound to one of them.
        await self._watch.refresh()
        self._fleet_known.set()
        await self._intake.run()

    def _place(self, job: WaitingJob) -> None:
        self._scheduler.add_job(job)
        self._dispatcher.wake()

    async def _look_around(self) -> None:
        self._health.beat()
        # Nobody else would notice that a worker fell silent.
        self._dispatcher.wake()


async def _translated(duty: Coroutine[Any, Any, None]) -> None:
    with translate():
        await duty
