"""Addresses of brokers that are several servers: a master under Sentinel, or a cluster."""

from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redis.connection import parse_url

from tidemill.protocol.errors import ConfigError

_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
_SENTINEL_PORT = 26379
_CLUSTER_PORT = 6379

_SENTINEL_FORM = "redis+sentinel://[user:password@]host:26379,host:26379/master-name[/db]"
_CLUSTER_FORM = "redis+cluster://[user:password@]host:port,host:port"


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RoutedUrl:
    """An address that only tells whom to ask where the broker is.

    ``seeds`` are sentinels, which know the server called ``master``, or, where that is empty, nodes
    of a cluster.  ``options`` are redis-py's, for connections to the server; ``seed_options`` those
    for connections to the seeds.
    """

    seeds: tuple[Address, ...]
    master: str
    is_tls: bool
    options: dict[str, Any]
    seed_options: dict[str, Any]


def is_routed(url: str) -> bool:
    """Whether ``url`` is for ``parse_routed_url``; otherwise redis-py understands it."""
    return _scheme(url) in (*_SENTINEL_SCHEMES, *_CLUSTER_SCHEMES)


def is_cluster(url: str) -> bool:
    """Whether each shard may live on a server of its own."""
    return _scheme(url) in _CLUSTER_SCHEMES


def parse_routed_url(url: str) -> RoutedUrl:
    """Take a Sentinel's or a cluster's address apart; raises ``ConfigError`` naming what is wrong.

    The query takes redis-py's options, such as ``ssl_ca_certs``; sentinels have credentials of
    their own, ``sentinel_username`` and ``sentinel_password``.
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user_info, at, hosts = authority.rpartition("@")
    if scheme in _CLUSTER_SCHEMES:
        master, db, default_port = "", path, _CLUSTER_PORT
        if db.strip("/") not in ("", "0"):
            raise _wrong(url, f"a cluster has no database {db!r}", _CLUSTER_FORM)
    else:
        (master, _, db), default_port = path.partition("/"), _SENTINEL_PORT
        if not master or not (db or "0").isdecimal():
            raise _wrong(url, "it must end in /master-name or /master-name/db", _SENTINEL_FORM)
    is_tls = scheme.startswith("rediss")
    options = _options(url, f"{'rediss' if is_tls else 'redis'}://{user_info}{at}x/{db}?{query}")
    seed_options = dict(options)
    if master:
        seed_options |= {"username": None, "password": None, "db": 0}
        for name in ("username", "password"):
            seed_options[name] = options.pop(f"sentinel_{name}", None)
            seed_options.pop(f"sentinel_{name}", None)
    seeds = tuple(_address(url, text, default_port) for text in hosts.split(","))
    return RoutedUrl(seeds, master, is_tls, options, seed_options)


def redact(url: str) -> str:
    """``url`` without user, password and query, fit for messages and logs."""
    # Whatever precedes the last @ may be part of a password that somebody forgot to encode.
    before, at, after = url.rpartition("@")
    shown = after.partition("?")[0]
    return f"{_scheme(before)}://***@{shown}" if at else shown


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _options(url: str, plain_url: str) -> dict[str, Any]:
    try:
        # redis-py leaves parse_url untyped.
        options = parse_url(plain_url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise _wrong(url, str(error), _SENTINEL_FORM) from error
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    return dict(options)


def _address(url: str, text: str, default_port: int) -> Address:
    form = _SENTINEL_FORM if default_port == _SENTINEL_PORT else _CLUSTER_FORM
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _wrong(url, f"{text!r} is not host:port ({error})", form) from error
    if not host or parts.path:
        raise _wrong(url, f"{text!r} is not host:port", form)
    return Address(host, default_port if port is None else port)


def _wrong(url: str, what: str, form: str) -> ConfigError:
    return ConfigError(f"the broker address {redact(url)!r}: {what}", fix=f"Its form is {form}.")
