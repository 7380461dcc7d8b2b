"""The broker of an installation: one that was given, or one that we start and own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis
from redis import exceptions

from tidemill.service.broker_config import socket_path_of, socket_url
from tidemill.service.embedded_broker import Durability, EmbeddedBroker, ping
from tidemill.service.fsync_probe import FsyncPolicy
from tidemill.service.redis import check_server, connect, translate

__all__ = ["BrokerHandle", "Durability", "EmbeddedBroker", "resolve_broker", "running_broker_url"]

_CHECK_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class BrokerHandle:
    """Where the broker is; a context manager that stops it if ``embedded`` says we own it."""

    url: str
    version: tuple[int, ...]
    durability: Durability
    embedded: EmbeddedBroker | None = None

    def stop(self) -> None:
        """Stop a server of ours, leave any other alone; may be repeated."""
        if self.embedded is not None:
            self.embedded.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def resolve_broker(
    url: str | None,
    data_dir: Path,
    port: int | None = None,
    *,
    fsync: FsyncPolicy | Literal["auto"] = "auto",
    shard: str = "00",
) -> BrokerHandle:
    """The server at ``url`` if there is one, else an embedded server on ``data_dir``.

    Raises ``BrokerUnavailable`` or ``BrokerUnsupported`` about a given server; without ``url``
    what ``EmbeddedBroker.start`` raises.
    """
    if url:
        return _external(url, shard)
    embedded = EmbeddedBroker.start(data_dir, port=port, fsync=fsync)
    return BrokerHandle(embedded.url, embedded.version, embedded.durability, embedded)


def running_broker_url(data_dir: Path) -> str | None:
    """The address of the embedded server that some process runs on ``data_dir``, if any."""
    path = socket_path_of(data_dir)
    if not path.is_socket():
        return None
    url = socket_url(path)
    with connect(url, timeout_seconds=_CHECK_TIMEOUT_SECONDS, retries=0) as client:
        return None if ping(client) == "silent" else url


def _external(url: str, shard: str) -> BrokerHandle:
    with connect(url, shard=shard, timeout_seconds=_CHECK_TIMEOUT_SECONDS, retries=1) as client:
        info = check_server(client)
        return BrokerHandle(url, info.version, _durability(client))


def _durability(client: redis.Redis) -> Durability:
    try:
        with translate():
            settings = client.config_get("append*")
    except exceptions.ResponseError:
        return "unknown"  # managed servers forbid CONFIG
    return durability_of({str(name): str(value) for name, value in settings.items()})


def durability_of(settings: Mapping[str, str]) -> Durability:
    """The level that a server's ``append*`` settings amount to."""
    if settings.get("appendonly") != "yes":
        return "none"
    return "fsync" if settings.get("appendfsync") == "always" else "fast"
