"""Connections to the broker: how they are made, what they must find, how their errors are told."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from tidemill.protocol.errors import BrokerUnavailable, BrokerUnsupported, ConfigError
from tidemill.service.broker_binary import MIN_VERSION

#: Bound on one reply; a blocking read must ask the server for less than this.
SOCKET_TIMEOUT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 5.0
#: Six tries within one to two seconds; an outage longer than that is the caller's to handle.
RETRIES = 5

_BACKOFF_BASE_SECONDS = 0.05
_BACKOFF_CAP_SECONDS = 1.0
_FIX = "Start one with `tidemill up`, or set TIDEMILL_REDIS_URL to a running server."

#: A server that is gone, still loading its log, or a replica that was promoted or demoted.
_UNAVAILABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself; ``run_id`` changes whenever it restarts."""

    name: str
    version: tuple[int, ...]
    pid: int
    run_id: str


def connect(
    url: str,
    *,
    client_name: str = "",
    timeout_seconds: float = SOCKET_TIMEOUT_SECONDS,
    retries: int = RETRIES,
) -> redis.Redis:
    """A lazy synchronous client that returns bytes; raises ``ConfigError`` for a bad URL.

    Lost replies are retried, so every write sent through it must be idempotent.
    """
    options = _options(client_name, timeout_seconds)
    with _url_errors(url):
        return redis.Redis.from_url(url, retry=Retry(_backoff(), retries), **options)


def connect_async(
    url: str,
    *,
    client_name: str = "",
    timeout_seconds: float = SOCKET_TIMEOUT_SECONDS,
    retries: int = RETRIES,
) -> redis.asyncio.Redis:
    """The asynchronous twin of ``connect``."""
    options = _options(client_name, timeout_seconds)
    with _url_errors(url):
        return redis.asyncio.Redis.from_url(url, retry=AsyncRetry(_backoff(), retries), **options)


@contextmanager
def translate() -> Iterator[None]:
    """Raise ``BrokerUnavailable`` in place of what redis-py raises when the server is away."""
    try:
        yield
    except _UNAVAILABLE as error:
        raise _unavailable(error) from error


def is_refused(error: BrokerUnavailable) -> bool:
    """Whether the server was there but refused the credentials, so that waiting is in vain."""
    return isinstance(_told(error.__cause__), exceptions.AuthenticationError)


def check_server(client: redis.Redis) -> ServerInfo:
    """Ask a server who it is.

    Raises ``BrokerUnavailable`` if it does not answer, ``BrokerUnsupported`` if it is too old or
    may evict keys, that is, lose accepted jobs.
    """
    with translate():
        fields: dict[str, Any] = client.info()
    info = server_info(fields)
    if compatible_version(fields) < MIN_VERSION:
        found = ".".join(map(str, info.version))
        raise BrokerUnsupported(
            f"the broker is {info.name} {found}; Tidemill needs Redis >= 7.0 or Valkey >= 7.2",
            fix="Upgrade it, or unset TIDEMILL_REDIS_URL to use the embedded server.",
        )
    _check_eviction(fields)
    return info


def server_info(fields: dict[str, Any]) -> ServerInfo:
    """Read the reply to ``INFO``."""
    name = "Valkey" if "valkey_version" in fields else "Redis"
    version = fields.get("valkey_version", fields.get("redis_version", "0"))
    return ServerInfo(
        name=name,
        version=_parse_version(version),
        pid=int(fields.get("process_id", 0)),
        run_id=str(fields.get("run_id", "")),
    )


def redact(url: str) -> str:
    """``url`` without user and password, fit for messages and logs."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url.partition("?")[0]
    return f"{parts.scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}"


def _unavailable(error: Exception) -> BrokerUnavailable:
    told = _told(error)
    if isinstance(told, exceptions.AuthenticationError):
        return BrokerUnavailable(
            f"the broker refused the credentials: {told}",
            fix="Check the user and password in TIDEMILL_REDIS_URL.",
        )
    if isinstance(told, exceptions.BusyLoadingError):
        return BrokerUnavailable(
            "the broker is still loading its data", fix="Try again in a moment."
        )
    return BrokerUnavailable(f"the broker does not answer: {error}", fix=_FIX)


def _told(error: BaseException | None) -> BaseException | None:
    # redis-py's asynchronous client wraps what a new connection was told in a ConnectionError.
    cause = error.__cause__ if error else None
    return cause if isinstance(cause, exceptions.RedisError) else error


def _options(client_name: str, timeout_seconds: float) -> dict[str, Any]:
    return {
        "client_name": client_name or f"tidemill-{os.getpid()}",
        "decode_responses": False,
        # RESP2 replies have the same shape on every server we support; RESP3 maps do not.
        "protocol": 2,
        # No CLIENT SETINFO: Redis 7.0 has none, so that no ACL file could allow it everywhere.
        "driver_info": None,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(timeout_seconds, CONNECT_TIMEOUT_SECONDS),
        "health_check_interval": 30,
    }


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=_BACKOFF_BASE_SECONDS, cap=_BACKOFF_CAP_SECONDS)


@contextmanager
def _url_errors(url: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"{redact(url)!r} is not a broker address",
            fix="TIDEMILL_REDIS_URL takes redis://host:port/0, rediss://... or unix:///path.",
        ) from error


def _parse_version(text: object) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text).split(".")[:3] if part.isdecimal())


def compatible_version(fields: dict[str, Any]) -> tuple[int, ...]:
    """Read the Redis version a server is compatible with; Valkey tells its own elsewhere."""
    return _parse_version(fields.get("redis_version", "0"))


def _check_eviction(fields: dict[str, Any]) -> None:
    policy = str(fields.get("maxmemory_policy", "noeviction"))
    if int(fields.get("maxmemory", 0)) and policy != "noeviction":
        raise BrokerUnsupported(
            f"the broker evicts keys when memory is full (maxmemory-policy {policy})",
            fix="Run: redis-cli CONFIG SET maxmemory-policy noeviction.",
        )
