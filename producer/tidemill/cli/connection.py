"""Reaching the broker from the command line: a mistake is told at once, not after retries."""

from collections.abc import Iterator
from contextlib import contextmanager

from tidemill._endpoint import find_endpoint
from tidemill.client import Producer
from tidemill.protocol.errors import BrokerUnavailable
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
    with Producer(url, tenant=tenant, shard=shard) as producer:
        yield producer
