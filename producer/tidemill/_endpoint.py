"""Where a client finds its broker and whose jobs it submits."""

from dataclasses import dataclass
from pathlib import Path

from tidemill._request import check_tenant
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker_config import socket_path_of, socket_url
from tidemill.service.config import load_config, parse_shard


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A broker's address, a tenant on it, and the keys of the shard that holds its jobs."""

    url: str
    tenant: str
    keys: ShardKeys
    cache_dir: Path


def find_endpoint(url: str | None, tenant: str, shard: str | None) -> Endpoint:
    """Fill in what the caller left open from ``TIDEMILL_*``.

    Without any address it is that of the embedded server, wherever ``tidemill up`` puts it; without
    a shard it is the tenant's own.
    Raises ``ConfigError`` or ``InvalidRequest``.
    """
    config = load_config()
    return Endpoint(
        url=url or config.redis_url or socket_url(socket_path_of(config.data_dir)),
        tenant=check_tenant(tenant),
        keys=ShardKeys(config.shard_of(tenant) if shard is None else _checked(shard)),
        cache_dir=config.cache_dir,
    )


def _checked(shard: str) -> str:
    try:
        parse_shard(shard)
    except ValueError as error:
        raise ConfigError(f"shard is {shard[:40]!r}, but must be {error}") from error
    return shard
