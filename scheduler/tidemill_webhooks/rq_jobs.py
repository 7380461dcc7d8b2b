"""The queue of attempts in RQ: what may be run from it, and how it is filled.

RQ runs whatever function a job names, by importing it.  Who can write to its server must not gain
more than to run what is listed here.
"""

import os
from typing import Any

# RQ reads it when it is imported, and never again.
os.environ.setdefault("RQ_KEY_PREFIX", "tm:rq")

import redis
from rq import Queue as RqQueue
from rq import SimpleWorker
from rq.exceptions import DuplicateJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from tidemill.protocol.errors import BrokerUnavailable
from tidemill.service.redis import connect, translate

QUEUE_NAME = "webhooks"

#: All that a worker of ours runs, whatever a job says.
ALLOWED_FUNCTIONS = frozenset({"tidemill_webhooks.rq_worker.deliver"})
DELIVER = "tidemill_webhooks.rq_worker.deliver"

#: More than an attempt and its round trips can take.
TIMEOUT_SECONDS = 40
#: How long a worker without jobs may take to see that it shall leave, should the signal get lost.
IDLE_SECONDS = 2
#: A job that nobody has run until then was made again meanwhile.
QUEUED_TTL_SECONDS = 3600
FAILURE_TTL_SECONDS = 14 * 24 * 3600


class ForbiddenFunction(Exception):
    """A job names a function that is not ours to run."""


class SafeJob(Job):
    """A job that runs nothing but what is allowed, and has no callbacks and webhooks of RQ's."""

    @property
    def func(self) -> Any:
        """The function to run; raises ``ForbiddenFunction``."""
        if self.func_name not in ALLOWED_FUNCTIONS or self.instance is not None:
            raise ForbiddenFunction("the job names a function that may not be run")
        return super().func

    def restore(self, raw_data: Any) -> Any:
        """Read the stored job, but none of what it wants to be run after it."""
        result = super().restore(raw_data)
        self._success_callback_name = None
        self._failure_callback_name = None
        self._stopped_callback_name = None
        self.webhooks = []
        return result


class HookQueue:
    """Puts attempts into the queue, one job for each."""

    def __init__(self, url: str) -> None:
        self._client = connect(url, client_name="tidemill-webhooks")
        self._queue = make_queue(self._client)

    def put(self, shard: str, delivery_id: str, attempts: int, hands: int) -> None:
        """Leave an attempt to the workers; a second call with the same arguments does nothing.

        Raises ``BrokerUnavailable``.
        """
        try:
            with translate():
                self._queue.enqueue(
                    DELIVER,
                    args=(shard, delivery_id),
                    job_id=f"wh-{delivery_id}-{attempts}-{hands}",
                    unique=True,
                    description="webhook",
                    job_timeout=TIMEOUT_SECONDS,
                    ttl=QUEUED_TTL_SECONDS,
                    result_ttl=0,
                    failure_ttl=FAILURE_TTL_SECONDS,
                )
        except DuplicateJobError:
            return
        except redis.RedisError as error:
            raise BrokerUnavailable(f"the queue refuses a job: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def make_queue(client: redis.Redis) -> RqQueue:
    """Return the one queue that a worker serves.

    With a second one RQ would take jobs off in a way that loses them with their worker.
    """
    return RqQueue(
        QUEUE_NAME, connection=client, serializer=JSONSerializer, job_class=SafeJob, is_async=True
    )


class HookWorker(SimpleWorker):
    """Runs jobs in this very process; it leaves when asked to, whatever it does just then.

    RQ raises an exception in the signal's handler, which is lost where code of others catches
    everything, as a log's handler does, and then waits for a job as if nobody had asked.
    """

    def _shutdown(self) -> None:
        self._stop_requested = True
        super()._shutdown()  # type: ignore[no-untyped-call]

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, RqQueue] | None:
        """Wait for a job; None as soon as the worker shall leave, or a burst is over."""
        if timeout is None:
            return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
        found = None
        while found is None and not self._stop_requested:
            found = super().dequeue_job_and_maintain_ttl(timeout, max_idle_time=IDLE_SECONDS)
        return found


def make_worker(client: redis.Redis, name: str) -> HookWorker:
    """Return the worker of the one queue."""
    return HookWorker(
        [make_queue(client)],
        name=name,
        connection=client,
        job_class=SafeJob,
        serializer=JSONSerializer,
        log_job_description=False,
        default_result_ttl=0,
    )
