"""How long to keep trying while the broker is away, and what its refusals are called."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from tidemill.protocol.errors import BrokerError, BrokerUnavailable, BrokerUnsupported
from tidemill.protocol.functions import typed_error
from tidemill.service.redis import is_refused, translate

#: How long one call may wait for the broker, in seconds.
DEFAULT_TIMEOUT_SECONDS = 10.0

#: Share of it that one try may take: a connection that died without a word costs one try.
TRY_SHARE = 1 / 3

_BASE_SECONDS = 0.02
_CAP_SECONDS = 0.5


class LibraryMissing(BrokerUnsupported):
    """The server does not know Tidemill's functions; loading them is the cure."""


class LibraryExists(BrokerError):
    """Another process has loaded the functions meanwhile."""


class SaltMissing(BrokerError):
    """The tenant has no salt, because the server lost its data; making one is the cure."""


class Patience:
    """The waits between the tries of one call: growing, jittered, ``seconds`` in all."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._wait = _BASE_SECONDS

    def next_wait(self, error: BrokerUnavailable) -> float:
        """Return how long to wait before the next try; raises ``error`` if time is up."""
        left = self._deadline - time.monotonic()
        if left <= 0 or is_refused(error):
            raise error
        wait = min(self._wait, left) * random.uniform(0.5, 1.0)
        self._wait = min(self._wait * 2, _CAP_SECONDS)
        return wait


@contextmanager
def broker_errors() -> Iterator[None]:
    """Raise errors of our tree in place of redis-py's."""
    try:
        with translate():
            yield
    except redis.RedisError as error:
        # Of commands that are no functions, such as loading those, memory may be too full as well.
        raise typed_error(error) or _refusal(error) from error


def _refusal(error: redis.RedisError) -> BrokerError:
    said = str(error)
    if "Function not found" in said:
        return LibraryMissing(
            "the broker does not have Tidemill's functions", fix="Start it with `tidemill up`."
        )
    if "already exists" in said:
        return LibraryExists(f"the broker refused to load functions: {said}")
    if said.startswith("NOREPLICAS"):
        return BrokerUnavailable(
            "the broker has too few replicas to take writes",
            fix="Bring them back, or lower min-replicas-to-write.",
        )
    if said.startswith("NOSALT"):
        return SaltMissing("the tenant has no salt", fix="Submit again.")
    return BrokerError(
        f"the broker refused a command: {said}",
        fix="Check its version and the permissions of the user in TIDEMILL_REDIS_URL.",
    )
