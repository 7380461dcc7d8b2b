"""Connections to the broker: how they are made, what they must find, how their errors are told."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from tidemill.protocol.errors import BrokerUnavailable, BrokerUnsupported, ConfigError
from tidemill.service.broker_binary import MIN_VERSION
from tidemill.service.broker_url import is_routed, parse_routed_url, redact
from tidemill.service.routed_client import routed_client, routed_client_async
from tidemill.service.routing import told_by

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
    shard: str = "00",
    client_name: str = "",
    timeout_seconds: float = SOCKET_TIMEOUT_SECONDS,
    retries: int = RETRIES,
) -> redis.Redis:
    """A lazy synchronous client of the server that holds ``shard``; it returns bytes.

    Raises ``ConfigError`` for a bad URL.  Lost replies are retried, so every write sent through it
    must be idempotent.
    """
    options = _options(client_name, timeout_seconds) | {"retry": Retry(_backoff(), retries)}
    with _url_errors(url):
        if not is_routed(url):
            client = redis.Redis.from_url(url, **options)
        else:
            client = routed_client(parse_routed_url(url), shard, options)
        _check_options(client.connection_pool)
    return client


def connect_async(
    url: str,
    *,
    shard: str = "00",
    client_name: str = "",
    timeout_seconds: float = SOCKET_TIMEOUT_SECONDS,
    retries: int = RETRIES,
) -> redis.asyncio.Redis:
    """The asynchronous twin of ``connect``."""
    options = _options(client_name, timeout_seconds) | {"retry": AsyncRetry(_backoff(), retries)}
    with _url_errors(url):
        if not is_routed(url):
            client = redis.asyncio.Redis.from_url(url, **options)
        else:
            client = routed_client_async(parse_routed_url(url), shard, options)
        _check_options(client.connection_pool)
    return client


@contextmanager
def translate() -> Iterator[None]:
    """Raise ``BrokerUnavailable`` in place of what redis-py raises when the server is away."""
    try:
        yield
    except _UNAVAILABLE as error:
        raise _unavailable(error) from error
    except exceptions.MovedError as error:
        raise BrokerUnsupported(
            f"the broker is one node of a cluster and does not hold this shard ({error})",
            fix="Write its address as redis+cluster://host:port,host:port.",
        ) from error


def is_refused(error: BrokerUnavailable) -> bool:
    """Whether the server was there but we do not suit each other, so that waiting is in vain.

    Either it refused our credentials, or we its certificate.
    """
    cause = error.__cause__
    told = isinstance(told_by(cause), exceptions.AuthenticationError)
    return told or _certificate_error(cause) is not None


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


def _unavailable(error: Exception) -> BrokerUnavailable:
    told = told_by(error)
    if isinstance(told, exceptions.AuthenticationError):
        return BrokerUnavailable(
            f"the broker refused the credentials: {told}",
            fix="Check the user and password in TIDEMILL_REDIS_URL.",
        )
    if isinstance(told, exceptions.BusyLoadingError):
        return BrokerUnavailable(
            "the broker is still loading its data", fix="Try again in a moment."
        )
    if certificate_error := _certificate_error(error):
        return BrokerUnavailable(
            f"the broker's certificate is not accepted: {certificate_error.verify_message}",
            fix="Check the host name in TIDEMILL_REDIS_URL and its ssl_ca_certs=/path/to/ca.pem.",
        )
    return BrokerUnavailable(f"the broker does not answer: {error}", fix=_FIX)


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    # redis-py raises a ConnectionError while it handles what the TLS library said.
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _check_options(pool: Any) -> None:
    # Now, not at the first command: redis-py takes any option from a URL's query.
    pool.connection_class(**pool.connection_kwargs)
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        path = pool.connection_kwargs.get(name)
        if path and not Path(path).is_file():
            raise ValueError(f"{name}: there is no file {path}")


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
    except (TypeError, ValueError) as error:
        unknown = str(error).partition("unexpected keyword argument ")[2]
        reason = f"no such option: {unknown}" if unknown else error
        raise ConfigError(
            f"{redact(url)!r} is not a broker address: {reason}",
            fix="TIDEMILL_REDIS_URL takes redis://host:port/0, rediss://..., unix:///path,"
            " redis+sentinel://host:port/master or redis+cluster://host:port.",
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
