"""The synchronous connection to the broker: calls and reads that outlast its short absences."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tidemill._endpoint import Endpoint
from tidemill._patience import (
    TRY_SHARE,
    LibraryExists,
    LibraryMissing,
    Patience,
    broker_errors,
)
from tidemill._plan import Plan
from tidemill._reads import Read
from tidemill.protocol.errors import BrokerUnavailable, ProtocolError, TidemillError
from tidemill.protocol.functions import LUA_SOURCE, Call, run, run_many
from tidemill.protocol.ids import shard_of
from tidemill.service.broker_url import is_cluster
from tidemill.service.redis import connect

R = TypeVar("R")


class Link:
    """Sends calls and reads, again while the broker is away; all of them are idempotent.

    Safe to use from several threads.  Raises ``BrokerUnavailable`` after ``timeout`` seconds.
    """

    def __init__(self, url: str, shard: str, timeout: float) -> None:
        #: How long one call may wait for the broker, in seconds.
        self.timeout = timeout
        self.client = connect(url, shard=shard, timeout_seconds=timeout * TRY_SHARE, retries=0)

    def call(self, call: Call[R]) -> R:
        """Run one function."""
        return self.retry(lambda: run(self.client, call))

    def call_many(self, calls: Sequence[Call[R]]) -> list[R | TidemillError]:
        """Run functions in one round trip; an error takes the place of its call's result."""
        return self.retry(lambda: run_many(self.client, calls))

    def read(self, read: Read[R]) -> R:
        """Read once."""
        return read.parse(self.retry(lambda: self._send([read]))[0])

    def read_many(self, reads: Sequence[Read[R]]) -> list[R | ProtocolError]:
        """Read many things in one round trip; an error takes the place of what is unreadable."""
        replies = self.retry(lambda: self._send(reads))
        return [_parse(read, reply) for read, reply in zip(reads, replies, strict=True)]

    def carry_out(self, plan: Plan[R]) -> R:
        """Do what ``plan`` asks for, step by step; returns what it came to."""
        reply: Any = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as stop:
                result: R = stop.value
                return result
            reply = self.read(step) if isinstance(step, Read) else self.call_many(step)

    def close(self) -> None:
        """Close every connection."""
        self.client.close()

    def _send(self, reads: Sequence[Read[Any]]) -> list[list[Any]]:
        with self.client.pipeline(transaction=False) as pipeline:
            for read in reads:
                for command in read.commands:
                    pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            replies = iter(pipeline.execute())
        return [[next(replies) for _ in read.commands] for read in reads]

    def retry(self, action: Callable[[], R]) -> R:
        """Do ``action``, which may be repeated, until the broker answers."""
        patience, may_load = Patience(self.timeout), True
        while True:
            try:
                with broker_errors():
                    return action()
            except LibraryMissing:
                if not may_load:
                    raise
                may_load = False
                self._load_library()
            except BrokerUnavailable as error:
                time.sleep(patience.next_wait(error))

    def _load_library(self) -> None:
        # Never in place of another one: this process may be the older of two.
        with suppress(LibraryExists), broker_errors():
            self.client.function_load(LUA_SOURCE)


class Links:
    """One link to each shard in use, made when it is needed; one for all but on a cluster."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._lock = threading.Lock()
        self._others: dict[str, Link] = {}
        #: The link to the shard of the tenant.
        self.home = Link(endpoint.url, endpoint.keys.shard, timeout)

    def of(self, job_id: str) -> Link:
        """Return the link to the shard that ``job_id`` names; raises ``InvalidRequest``."""
        shard, endpoint = shard_of(job_id), self._endpoint
        if shard == endpoint.keys.shard or not is_cluster(endpoint.url):
            return self.home
        with self._lock:
            if shard not in self._others:
                self._others[shard] = Link(endpoint.url, shard, self._timeout)
            return self._others[shard]

    def close(self) -> None:
        """Close every connection."""
        for link in (self.home, *self._others.values()):
            link.close()


def _parse(read: Read[R], reply: list[Any]) -> R | ProtocolError:
    try:
        return read.parse(reply)
    except ProtocolError as error:
        return error
