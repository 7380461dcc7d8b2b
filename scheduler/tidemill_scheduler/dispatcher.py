"""Asks the scheduler for decisions and carries them out, many in a round trip."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.calls import Dispatched
from tidemill.protocol.functions import Call, run_each_async
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.states import JobState
from tidemill.service.runtime import crash_point
from tidemill_scheduler import metrics
from tidemill_scheduler.health import Health
from tidemill_scheduler.policy.hints import Hint
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import Scheduler

_log = logging.getLogger(__name__)

#: The server serves nobody else while it works one pipeline off.
_MAX_PIPELINE = 128


class Dispatcher:
    """Sends dispatches in the name of one epoch and reports their fate to the scheduler.

    It rests until it is woken, so whoever changes what could be decided must ``wake`` it.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        scheduler: Scheduler,
        health: Health,
        *,
        epoch: int,
        lease_ms: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._scheduler = scheduler
        self._epoch = epoch
        self._lease_ms = lease_ms
        self._health = health
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """Let it decide again: there is a job, a worker or credit that was not there before."""
        self._awake.set()

    async def run(self) -> None:
        """Give jobs out for ever.  Raises ``StaleEpoch``."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            with metrics.TICK_SECONDS.time():
                dispatches = self._scheduler.tick(time.monotonic())
                hints = self._scheduler.take_hints()
            num_sent = 0
            if dispatches:
                self._health.note_work(runnable=True, num_dispatched=0)
            if dispatches or hints:
                num_sent = await self.send(dispatches, hints)
            if dispatches or self._scheduler.is_unfinished:
                # There may be more: a tick is bounded, and refused dispatches gave credit back.
                self.wake()
            runnable = self._scheduler.is_runnable(time.monotonic())
            self._health.note_work(runnable=runnable, num_dispatched=num_sent)
            metrics.WAITING_JOBS.set(self._scheduler.num_waiting)

    async def send(self, dispatches: Sequence[Dispatch], hints: Sequence[Hint] = ()) -> int:
        """Write run commands, then hints; returns how many jobs went out.  Raises ``StaleEpoch``.

        A hint that the server refuses is left out: it could only have saved work.
        """
        crash_point("scheduler.before_dispatch")
        num_sent = 0
        orders: list[Dispatch | Hint] = [*dispatches, *_pieces(hints)]
        for start in range(0, len(orders), _MAX_PIPELINE):
            batch = orders[start : start + _MAX_PIPELINE]
            replies = await run_each_async(self._client, [self._call_of(order) for order in batch])
            num_sent += sum(map(self._settle_order, batch, replies))
        crash_point("scheduler.after_dispatch")
        metrics.DISPATCHED.inc(num_sent)
        return num_sent

    def _call_of(self, order: Dispatch | Hint) -> Call[Any]:
        if isinstance(order, Hint):
            return calls.hint(self._keys, worker_id=order.worker_id, refs=order.refs)
        return self._call(order)

    def _settle_order(self, order: Dispatch | Hint, reply: Any) -> bool:
        if isinstance(order, Dispatch):
            return self._settle(order, reply)
        if isinstance(reply, Exception):
            metrics.LOST_HINTS.inc()
            _log.debug("the hint for %s was refused: %s", order.worker_id, reply)
        return False

    def _call(self, dispatch: Dispatch) -> Call[Dispatched]:
        return calls.dispatch(
            self._keys,
            job_id=dispatch.job.job_id,
            queue=dispatch.job.queue,
            entry_id=dispatch.job.entry_id,
            worker_id=dispatch.worker_id,
            epoch=self._epoch,
            lease_ms=self._lease_ms,
        )

    def _settle(self, dispatch: Dispatch, reply: Dispatched | Exception) -> bool:
        if isinstance(reply, Exception):
            raise reply
        job_id = dispatch.job.job_id
        if reply.fence:
            _log.debug("%s goes to %s, fence %d", job_id, dispatch.worker_id, reply.fence)
            self._scheduler.sent(dispatch, reply.command_id, time.monotonic())
            return True
        # The job was cancelled in the queue, or an earlier reply to this very dispatch was lost.
        # Then the command is in the stream already, and the worker's status will count it.
        self._scheduler.dropped(dispatch)
        if reply.state == JobState.RUNNING and reply.worker_id == dispatch.worker_id:
            return True
        metrics.NOT_QUEUED.inc()
        _log.debug("%s is %s, not dispatched", job_id, reply.state)
        return False


def _pieces(hints: Sequence[Hint]) -> Iterator[Hint]:
    """Cut hints into such as a worker reads."""
    for hint in hints:
        refs = list(hint.refs.items())
        for start in range(0, len(refs), calls.MAX_HINTS):
            yield Hint(hint.worker_id, dict(refs[start : start + calls.MAX_HINTS]))
