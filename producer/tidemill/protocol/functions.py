"""The typed face of the Redis Functions in ``tidemill.protocol.library``.

Each builder returns a ``Call``: a pure value that the ``run`` helpers execute on a synchronous or
an asynchronous client, alone or pipelined.  All functions are idempotent, so a call whose reply
was lost may simply be made again.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import redis
import redis.asyncio

from tidemill.protocol.errors import (
    BatchClosed,
    BrokerUnavailable,
    BrokerUnsupported,
    IdempotencyConflict,
    NoSuchObject,
    QueueFull,
    RateLimited,
    StaleEpoch,
    TidemillError,
)
from tidemill.protocol.library import library_name, library_source

LIBRARY = library_name()
LUA_SOURCE = library_source()

R = TypeVar("R")
Field = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One function call: name, KEYS, ARGV and how to read its reply."""

    name: str
    keys: tuple[str, ...]
    args: tuple[Field, ...]
    parse: Callable[[Any], R]

    @property
    def command(self) -> tuple[Field, ...]:
        """The call as a Redis command."""
        return ("FCALL", f"{LIBRARY}_{self.name}", len(self.keys), *self.keys, *self.args)


def run(client: redis.Redis, call: Call[R]) -> R:
    """Execute one call; raises the typed error that the function answers with."""
    with _typed_errors():
        # redis-py leaves execute_command untyped.
        return call.parse(client.execute_command(*call.command))  # type: ignore[no-untyped-call]


async def run_async(client: redis.asyncio.Redis, call: Call[R]) -> R:
    """Execute one call on an asynchronous client."""
    with _typed_errors():
        reply = cast(
            Awaitable[Any],
            client.execute_command(*call.command),  # type: ignore[no-untyped-call]
        )
        return call.parse(await reply)


def run_many(client: redis.Redis, calls: Sequence[Call[R]]) -> list[R | TidemillError]:
    """Execute calls in one round trip; an error takes the place of its call's result."""
    return _parse_all(calls, _send(client, calls))


def run_each(
    client: redis.Redis, calls: Sequence[Call[R]]
) -> list[R | TidemillError | redis.ResponseError]:
    """``run_many`` whose calls fail alone: the server's own errors take their places as well."""
    return _parse_each(calls, _send(client, calls))


async def run_each_async(
    client: redis.asyncio.Redis, calls: Sequence[Call[R]]
) -> list[R | TidemillError | redis.ResponseError]:
    """``run_each`` on an asynchronous client."""
    return _parse_each(calls, await _send_async(client, calls))


def _parse_each(
    calls: Sequence[Call[R]], replies: Sequence[Any]
) -> list[R | TidemillError | redis.ResponseError]:
    results: list[R | TidemillError | redis.ResponseError] = []
    for call, reply in zip(calls, replies, strict=True):
        if isinstance(reply, redis.ResponseError):
            results.append(typed_error(reply) or reply)
        elif isinstance(reply, Exception):
            raise reply
        else:
            results.append(call.parse(reply))
    return results


def _send(client: redis.Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.command)  # type: ignore[no-untyped-call]
    return pipeline.execute(raise_on_error=False)


async def run_many_async(
    client: redis.asyncio.Redis, calls: Sequence[Call[R]]
) -> list[R | TidemillError]:
    """Execute calls in one round trip on an asynchronous client."""
    return _parse_all(calls, await _send_async(client, calls))


async def _send_async(client: redis.asyncio.Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.command)
    return await pipeline.execute(raise_on_error=False)


def ensure_library(client: redis.Redis) -> None:
    """Load the function library unless this very version is loaded.

    A user who may not do that relies on one who did; raises ``BrokerUnsupported`` if nobody did,
    ``BrokerUnavailable`` while the server's memory is full.
    """
    try:
        loaded = client.function_list(library=LIBRARY, withcode=True)
    except redis.exceptions.NoPermissionError:
        return _probe_library(client)
    if LUA_SOURCE.encode() in _flatten(loaded):
        return
    try:
        client.function_load(LUA_SOURCE, replace=True)
    except redis.exceptions.NoPermissionError as error:
        raise _library_missing() from error
    except redis.exceptions.OutOfMemoryError as error:
        # It passes, other than what a server cannot do.
        raise BrokerUnavailable(
            "the server's memory is full, so that it takes no function library",
            fix="Wait until jobs have ended, or raise maxmemory.",
        ) from error
    except redis.ResponseError as error:
        raise BrokerUnsupported(
            f"the server refused Tidemill's function library: {error}",
            fix="Use Redis 7.0 or Valkey 7.2 or newer, with FUNCTION allowed for this user.",
        ) from error


def _probe_library(client: redis.Redis) -> None:
    try:
        client.fcall(f"{LIBRARY}_append", 0)  # of no job: does nothing
    except redis.exceptions.NoPermissionError:
        return  # this user cannot find out; its own first call will
    except redis.ResponseError as error:
        raise _library_missing() from error


def _library_missing() -> BrokerUnsupported:
    return BrokerUnsupported(
        f"the server does not have this version of the function library {LIBRARY},"
        " and this user may not load it",
        fix="Load it as the deploy user, see docs/operations.md.",
    )


def _flatten(value: Any) -> set[bytes]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*(_flatten(item) for item in value)) if value else set()
    return {value.encode() if isinstance(value, str) else value} if value else set()


class _typed_errors:
    """Turns the error codes of the library into errors of our tree."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, redis.ResponseError) and (typed := typed_error(error)):
            raise typed from error


def _parse_all(calls: Sequence[Call[R]], replies: Sequence[Any]) -> list[R | TidemillError]:
    results: list[R | TidemillError] = []
    for call, reply in zip(calls, replies, strict=True):
        results.append(_failure(reply) if isinstance(reply, Exception) else call.parse(reply))
    return results


def _failure(reply: Exception) -> TidemillError:
    typed = typed_error(reply)
    if typed is None:
        raise reply
    return typed


def typed_error(error: Exception) -> TidemillError | None:
    """Return the error of our tree that a function's error reply stands for, if it is one."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return QueueFull("the server's memory is full", retry_after_seconds=5.0)
    code, *details = str(error).split(" ")
    make = _ERRORS.get(code)
    return make(*details) if make is not None else None


def _queue_full(what: str, used: str, retry_ms: str) -> QueueFull:
    told = {
        "jobs": f"the tenant already has {used} queued jobs",
        "tokens": f"the tenant's queued jobs already have {used} tokens",
        "bytes": f"the shard's unfinished jobs already take {used} bytes",
    }
    return QueueFull(told[what], retry_after_seconds=int(retry_ms) / 1000)


def _rate_limited(what: str, limit: str, retry_ms: str) -> RateLimited:
    unit = {"rpm": "requests", "tpm": "tokens"}[what]
    return RateLimited(
        f"the tenant's {limit} {unit} per minute are used up",
        retry_after_seconds=int(retry_ms) / 1000,
        unit=unit,
    )


def _conflict(job_id: str) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"idempotency_key: already used for {job_id} with another body",
        field="idempotency_key",
        fix="Use a new key for a new body.",
        job_id=job_id,
    )


def _batch_closed(batch: str) -> BatchClosed:
    return BatchClosed(
        f"batch: {batch!r} was closed and takes no more jobs",
        field="batch",
        fix="Use a new name.",
    )


#: First word of a function's error reply -> the error it stands for, made of the other words.
_ERRORS: dict[str, Callable[..., TidemillError]] = {
    "EPOCH": lambda: StaleEpoch("a newer scheduler leads this shard"),
    "CONFLICT": _conflict,
    "BATCHCLOSED": _batch_closed,
    "NOFILE": lambda: NoSuchObject(
        "input_file_id: there is no such file any more", object_id="", fix="Upload it again."
    ),
    "QUEUEFULL": _queue_full,
    "RATELIMITED": _rate_limited,
}
