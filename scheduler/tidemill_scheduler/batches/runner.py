"""The batches of one shard: finds those that work, and works on each of them."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tidemill._async_link import AsyncLink
from tidemill._reads import Read
from tidemill.batches.openai_requests import OpenAITranslator
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.state import GatewayState
from tidemill.protocol.batches import BatchState
from tidemill.protocol.errors import BrokerUnavailable, StaleFence, TidemillError
from tidemill.protocol.ids import new_ulid
from tidemill.protocol.keys import ShardKeys
from tidemill.service.blobs.store import BlobStore
from tidemill.service.redis import translate
from tidemill_scheduler.batches.batch_run import BatchRun, Outcome
from tidemill_scheduler.batches.lease import BatchName
from tidemill_scheduler.batches.places import Places
from tidemill_scheduler.batches.setbacks import Setbacks, may_pass
from tidemill_scheduler.batches.settings import RunnerSettings
from tidemill_scheduler.batches.tools import BatchTools
from tidemill_scheduler.tasks import end_tasks

_log = logging.getLogger(__name__)

_BROKER_SECONDS = 10.0
#: Waiting batches of which it is looked up whether they are to end.
_MAX_LATE = 256
_FAREWELL_SECONDS = 2.0


class BatchRunner:
    """Works on the batches of a shard that nobody else works on."""

    def __init__(
        self,
        url: str,
        keys: ShardKeys,
        blobs: BlobStore,
        settings: RunnerSettings,
    ) -> None:
        self._url, self._keys, self._blobs = url, keys, blobs
        self._settings = settings
        self._owner = f"{os.getpid()}-{new_ulid()}"
        self._link = AsyncLink(url, keys.shard, _BROKER_SECONDS)
        # Requests mean in a batch what they mean one by one.
        self._gateway = GatewayState(
            GatewaySettings(
                redis_url=url,
                broker_seconds=_BROKER_SECONDS,
                allow_private_webhooks=settings.allow_private_webhooks,
            )
        )
        self._tools: dict[str, BatchTools] = {}
        self._tasks: dict[BatchName, asyncio.Task[None]] = {}
        self._runs: dict[BatchName, BatchRun] = {}
        self._setbacks = Setbacks(settings.max_faults)
        self._places = Places(settings.max_batches, settings.turn_seconds)

    async def run(self) -> None:
        """Work until there has been nothing to do for ``idle_seconds``."""
        busy_at = time.monotonic()
        try:
            while time.monotonic() - busy_at < self._settings.idle_seconds:
                if await self._look():
                    busy_at = time.monotonic()
                await asyncio.sleep(self._settings.poll_seconds)
        finally:
            await self._leave()

    async def _look(self) -> bool:
        """Begin what is to be worked on; returns whether there is any batch."""
        try:
            with translate():
                found = await self._link.client.zrange(
                    self._keys.active_batches, 0, -1, withscores=True
                )
            members = cast(list[tuple[bytes, float]], found)
            ends = {name: end for m, end in members if (name := BatchName.read(m)) is not None}
            await self._begin_some(ends)
        except BrokerUnavailable as error:
            _log.warning("the batches wait: %s", error.one_line())
            return bool(self._tasks)
        return bool(members)

    async def _begin_some(self, ends: Mapping[BatchName, float]) -> None:
        """Begin what there is room for, given when batches end, in ms of the server's clock."""
        known = {*ends, *self._tasks}
        self._setbacks.keep_only(known)
        self._places.keep_only(known)
        waiting = self._waiting(list(ends))
        self._move(waiting)
        # What is to end has little to do, and does not wait until others are done.
        late = [name for name in waiting if name not in self._tasks][:_MAX_LATE]
        for name in await self._ending(late, ends) if late else ():
            if len(self._tasks) - self._places.num_busy < self._settings.max_batches:
                self._begin(name)

    def _move(self, waiting: Sequence[BatchName]) -> None:
        """Let batches begin and give their places back."""
        now = time.monotonic()
        moves = self._places.moves(waiting, now)
        for name in moves.give_back:
            self._places.give_back(name)
            # It may have ended since the places were looked at last.
            if (run := self._runs.get(name)) is not None:
                run.give_back()
        for name in moves.begin:
            self._places.take(name, now)
            self._begin(name)

    async def _ending(
        self, names: Sequence[BatchName], ends: Mapping[BatchName, float]
    ) -> list[BatchName]:
        """Return the batches that are being cancelled, or whose time is over."""
        keys = [self._keys.batch_object(name.tenant, name.batch_id) for name in names]
        commands = tuple(("HGET", key, "st") for key in keys)
        states = await self._link.read(Read(commands, list))
        now_ms = time.time() * 1000
        return [
            name
            for name, state in zip(names, states, strict=True)
            if state == BatchState.CANCELLING.encode() or ends[name] <= now_ms
        ]

    def _waiting(self, names: Sequence[BatchName]) -> list[BatchName]:
        """Return those that may be begun: first what never failed, then what ends first."""
        now = time.monotonic()
        waiting = [n for n in names if n not in self._tasks and not self._setbacks.rests(n, now)]
        return sorted(waiting, key=self._setbacks.num_faults)

    def _begin(self, name: BatchName) -> None:
        task = asyncio.create_task(self._try(name), name=name.batch_id)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._end(name))

    def _end(self, name: BatchName) -> None:
        self._tasks.pop(name, None)
        self._places.leave(name)

    async def _try(self, name: BatchName) -> None:
        """Work on a batch; after an error it gives up its place, and gets one again later."""
        try:
            run = self._runs[name] = BatchRun(self._tools_of(name.tenant), name, self._owner)
        except TidemillError as error:
            _log.warning("%s cannot be begun: %s", name.batch_id, error.one_line())
            self._setbacks.delay(name, time.monotonic())
            return
        try:
            outcome = await run.run()
            if outcome is Outcome.ELSEWHERE:
                self._places.doubt(name, time.monotonic() + self._settings.lease_seconds)
            if outcome is not Outcome.GAVE_BACK:
                self._setbacks.forget(name)
        except Exception as error:
            await self._note(run, name, error)
        finally:
            run.close()
            del self._runs[name]

    async def _note(self, run: BatchRun, name: BatchName, error: Exception) -> None:
        if isinstance(error, StaleFence):
            _log.warning("%s", error.one_line())
            return
        if isinstance(error, TidemillError) and may_pass(error):
            _log.warning("%s begins again: %s", name.batch_id, error.one_line())
            self._setbacks.delay(name, time.monotonic())
            return
        self._setbacks.note_fault(name, run.progress, time.monotonic())
        if not self._setbacks.is_hopeless(name):
            _log.error("%s begins again after an unexpected error", name.batch_id, exc_info=error)
            return
        _log.error("%s is given up after an unexpected error", name.batch_id, exc_info=error)
        try:
            await run.give_up(_told(error))
        except Exception:
            _log.exception("%s could not be ended, and is tried again", name.batch_id)

    def _tools_of(self, tenant: str) -> BatchTools:
        if tenant not in self._tools:
            self._tools[tenant] = BatchTools(
                self._link,
                self._keys,
                self._blobs,
                self._gateway.producer(tenant),
                OpenAITranslator(self._gateway, tenant),
                self._settings,
            )
        return self._tools[tenant]

    async def _leave(self) -> None:
        runs = list(self._runs.values())
        await end_tasks(list(self._tasks.values()))
        farewells: list[Any] = [asyncio.create_task(run.release()) for run in runs]
        if farewells:
            await asyncio.wait(farewells, timeout=_FAREWELL_SECONDS)
        await end_tasks(farewells)
        await self._gateway.close()
        await self._link.close()


def _told(error: Exception) -> str:
    if isinstance(error, TidemillError):
        return f"The batch cannot be worked off: {error.one_line()}"
    return f"The server failed ({type(error).__name__}); the log of its batch runner tells why."
