"""The daemon around the scheduler: connects, waits for its turn, leads, and starts over."""

import asyncio
import logging
import random
import time
from pathlib import Path

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.errors import (
    BrokerUnavailable,
    BrokerUnsupported,
    ConfigError,
    StaleEpoch,
    TidemillError,
)
from tidemill.protocol.functions import ensure_library, run
from tidemill.protocol.ids import new_scheduler_id
from tidemill.protocol.keys import ShardKeys
from tidemill.service.redis import check_server, connect, connect_async, is_refused, translate
from tidemill.service.runtime import StopSignal
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers, TokenizerStore
from tidemill_scheduler import metrics
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.fleet.grace import Grace
from tidemill_scheduler.health import Health, Role
from tidemill_scheduler.leadership import Leadership
from tidemill_scheduler.tasks import end_tasks
from tidemill_scheduler.term import Term

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0
#: A connection that served for this share of a lease was no part of a row of failures.  Longer
#: pauses where connections break within every lease would keep the grace from ever being over.
_STABLE_SHARE = 1 / 4

_FATAL = (ConfigError, BrokerUnsupported)


def is_lasting(error: TidemillError) -> bool:
    """Whether another try, or another process, would fail in the same way."""
    if isinstance(error, BrokerUnavailable):
        return is_refused(error)
    return isinstance(error, _FATAL)


class Daemon:
    """One scheduler process; ``run`` returns when it is drained."""

    def __init__(self, config: SchedulerConfig, cache_dir: Path, health: Health) -> None:
        self._config = config
        self._health = health
        self._keys = ShardKeys(config.shard)
        self._id = new_scheduler_id()
        self._tokenizers = AsyncRedisTokenizers(self._keys, TokenizerStore(cache_dir))
        self._grace = Grace(config.lease_seconds)
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._was_connected = False

    async def run(self, draining: StopSignal) -> None:
        """Serve until ``draining`` is up.

        Raises ``ConfigError``, ``BrokerUnsupported``, or ``BrokerUnavailable`` for credentials that
        were never accepted.
        """
        work = asyncio.create_task(self._serve())
        stop = asyncio.create_task(draining.wait_async())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks((work, stop))
        if not work.cancelled() and (failure := work.exception()):
            raise failure
        await asyncio.to_thread(self._resign)
        _log.info("drained")

    async def _serve(self) -> None:
        while True:
            try:
                await self._serve_once()
            except (StaleEpoch, BrokerUnavailable) as error:
                # Credentials that were good may be so again: someone is changing them.
                if is_lasting(error) and not self._was_connected:
                    raise
                _log.warning("the scheduler starts over: %s", error.one_line())
                await self._pause(error)
            except _FATAL:
                raise
            except Exception as error:
                # The outermost loop: whatever a term died of, the next one starts from the truth
                # in the broker.
                _log.exception("the scheduler starts over after an unexpected error")
                await self._pause(error)

    async def _pause(self, error: Exception) -> None:
        metrics.RESTARTS.labels(type(error).__name__).inc()
        if isinstance(error, StaleEpoch):
            return
        await asyncio.sleep(self._backoff_seconds * random.uniform(0.5, 1.0))
        self._backoff_seconds = min(2 * self._backoff_seconds, _MAX_BACKOFF_SECONDS)

    def _note_stable(self, started: float) -> None:
        if time.monotonic() - started >= self._config.lease_seconds * _STABLE_SHARE:
            self._backoff_seconds = _FIRST_BACKOFF_SECONDS

    async def _serve_once(self) -> None:
        self._health.enter(Role.DISCONNECTED)
        await asyncio.to_thread(self._prepare_server)
        self._was_connected = True
        # No retries inside the client: see Ingress.  A command that takes longer than the leader's
        # lease has cost us the lead anyway.
        client = connect_async(
            self._config.redis_url,
            shard=self._config.shard,
            client_name="tidemill-scheduler",
            timeout_seconds=self._config.leader_lease_seconds,
            retries=0,
        )
        started = time.monotonic()
        try:
            with translate():
                await self._lead(client)
        finally:
            self._note_stable(started)
            metrics.LEADER.set(0)
            self._health.enter(Role.DISCONNECTED)
            await client.aclose()

    async def _lead(self, client: redis.asyncio.Redis) -> None:
        leadership = Leadership(
            client, self._keys, self._id, lease_seconds=self._config.leader_lease_seconds
        )
        self._health.enter(Role.STANDBY)
        epoch = await leadership.acquire()
        metrics.LEADER.set(1)
        metrics.EPOCH.set(epoch)
        self._health.enter(Role.LEADER, epoch)
        term = Term(
            client,
            self._keys,
            self._config,
            leadership,
            self._tokenizers,
            self._health,
            self._grace,
        )
        await term.run()

    def _connect(self) -> redis.Redis:
        return connect(self._config.redis_url, shard=self._config.shard, retries=0)

    def _prepare_server(self) -> None:
        with translate(), self._connect() as client:
            check_server(client)
            ensure_library(client)

    def _resign(self) -> None:
        try:
            with translate(), self._connect() as client:
                run(client, calls.resign(self._keys, scheduler_id=self._id))
        except BrokerUnavailable as error:
            _log.warning("left without resigning: %s", error.message)
