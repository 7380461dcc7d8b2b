"""Reaching the broker from the command line: a mistake is told at once, not after retries."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from tidemill._endpoint import Endpoint, find_endpoint
from tidemill._link import Link
from tidemill._patience import DEFAULT_TIMEOUT_SECONDS
from tidemill.client import Producer
from tidemill.protocol.errors import BrokerUnavailable
from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker_url import redact
from tidemill.service.redis import check_server, connect, is_refused

_FIRST_CONTACT_SECONDS = 3.0


@contextmanager
def open_producer(
    redis_url: str | None, *, tenant: str = "default", shard: str | None = None
) -> Iterator[Producer]:
    """A client of the broker, which was there a moment ago.

    Raises ``BrokerUnavailable`` or ``BrokerUnsupported`` otherwise.  Later absences are waited out.
    """
    endpoint = find_endpoint(redis_url, tenant, shard)
    meet(endpoint)
    with Producer(endpoint.url, tenant=tenant, shard=endpoint.keys.shard) as producer:
        yield producer


@contextmanager
def open_link(redis_url: str | None, shard: str | None) -> Iterator[tuple[Link, ShardKeys]]:
    """A connection for what operators do on one shard, and its keys; raises the same errors."""
    endpoint = find_endpoint(redis_url, "default", shard)
    meet(endpoint)
    link = Link(endpoint.url, endpoint.keys.shard, DEFAULT_TIMEOUT_SECONDS)
    with closing(link):
        yield link, endpoint.keys


def meet(endpoint: Endpoint) -> None:
    """Raise ``BrokerUnavailable`` or ``BrokerUnsupported`` unless a broker is there."""
    url, shard = endpoint.url, endpoint.keys.shard
    with connect(url, shard=shard, timeout_seconds=_FIRST_CONTACT_SECONDS, retries=1) as client:
        try:
            check_server(client)
        except BrokerUnavailable as error:
            if is_refused(error):
                raise
            raise BrokerUnavailable(
                f"there is no broker at {redact(url)}: {error.__cause__ or error}",
                fix="Start one with `tidemill up`, or set TIDEMILL_REDIS_URL to a running server.",
            ) from error
