"""Carries the scheduler's decisions out, many in a round trip."""

import logging
from collections.abc import Sequence

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.calls import Dispatched
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.functions import Call, run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.states import JobState
from tidemill.service.runtime import crash_point
from tidemill_scheduler import metrics
from tidemill_scheduler.placement import Dispatch
from tidemill_scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

#: The server serves nobody else while it works one pipeline off.
_MAX_PIPELINE = 128


class Dispatcher:
    """Sends dispatches in the name of one epoch and reports their fate to the scheduler."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        scheduler: Scheduler,
        *,
        epoch: int,
        lease_ms: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._scheduler = scheduler
        self._epoch = epoch
        self._lease_ms = lease_ms

    async def send(self, dispatches: Sequence[Dispatch]) -> int:
        """Write the run commands; returns how many jobs went out.  Raises ``StaleEpoch``."""
        crash_point("scheduler.before_dispatch")
        num_sent = 0
        for start in range(0, len(dispatches), _MAX_PIPELINE):
            batch = dispatches[start : start + _MAX_PIPELINE]
            replies = await run_many_async(self._client, [self._call(d) for d in batch])
            num_sent += sum(map(self._settle, batch, replies))
        crash_point("scheduler.after_dispatch")
        metrics.DISPATCHED.inc(num_sent)
        return num_sent

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

    def _settle(self, dispatch: Dispatch, reply: Dispatched | TidemillError) -> bool:
        if isinstance(reply, TidemillError):
            raise reply
        job_id = dispatch.job.job_id
        if reply.fence:
            _log.debug("%s goes to %s, fence %d", job_id, dispatch.worker_id, reply.fence)
            self._scheduler.sent(dispatch, reply.command_id)
            return True
        # The job was cancelled in the queue, or an earlier reply to this very dispatch was lost.
        # Then the command is in the stream already, and the worker's status will count it.
        self._scheduler.dropped(dispatch)
        if reply.state == JobState.RUNNING and reply.worker_id == dispatch.worker_id:
            return True
        metrics.NOT_QUEUED.inc()
        _log.debug("%s is %s, not dispatched", job_id, reply.state)
        return False
