"""Clients of a server that is looked up at each connect."""

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker_url import RoutedUrl
from tidemill.service.routed_connection import (
    AsyncLocator,
    AsyncRoutedConnection,
    AsyncRoutedSSLConnection,
    Locator,
    RoutedConnection,
    RoutedSSLConnection,
)
from tidemill.service.routing import ClusterRouting, Routing, Seeds, SentinelRouting

#: Bound on one question to a sentinel or a cluster node.
_LOOKUP_SECONDS = 2.0


def routed_client(url: RoutedUrl, shard: str, options: dict[str, Any]) -> redis.Redis:
    """A client of the server that holds ``shard``, wherever it is when it connects."""
    plain = redis.connection.SSLConnection if url.is_tls else redis.connection.Connection
    lookup = _lookup_options(options) | {"retry": Retry(NoBackoff(), 0)} | url.seed_options
    pool = redis.ConnectionPool(
        connection_class=RoutedSSLConnection if url.is_tls else RoutedConnection,
        locator=Locator(_routing(url, shard), Seeds(url.seeds), plain, lookup),
        **options | url.options,
    )
    return redis.Redis.from_pool(pool)


def routed_client_async(url: RoutedUrl, shard: str, options: dict[str, Any]) -> redis.asyncio.Redis:
    """The asynchronous twin of ``routed_client``."""
    module = redis.asyncio.connection
    plain = module.SSLConnection if url.is_tls else module.Connection
    lookup = _lookup_options(options) | {"retry": AsyncRetry(NoBackoff(), 0)} | url.seed_options
    pool = redis.asyncio.ConnectionPool(
        connection_class=AsyncRoutedSSLConnection if url.is_tls else AsyncRoutedConnection,
        locator=AsyncLocator(_routing(url, shard), Seeds(url.seeds), plain, lookup),
        **options | url.options,
    )
    return redis.asyncio.Redis.from_pool(pool)


def _routing(url: RoutedUrl, shard: str) -> Routing:
    if url.master:
        return SentinelRouting(url.master)
    return ClusterRouting(key_slot(ShardKeys(shard).prefix.encode()))


def _lookup_options(options: Mapping[str, Any]) -> dict[str, Any]:
    bounds = ("socket_timeout", "socket_connect_timeout")
    # No name: a sentinel need not allow CLIENT SETNAME.
    return {**options, "client_name": None} | {
        name: min(options[name], _LOOKUP_SECONDS) for name in bounds
    }
