"""Where the records of responses are kept: in Redis, each with an owner and a life."""

from tidemill._async_shared import AsyncShared
from tidemill._endpoint import find_endpoint
from tidemill.protocol.calls import responses as calls
from tidemill.protocol.errors import QueueFull
from tidemill.protocol.keys import keys_of
from tidemill.responses.record import ResponseRecord, no_response, read_record, response_id

#: From the creation; a job may wait for so long.
LIFE_SECONDS = 30 * 24 * 3600
#: From when the end was told first: a little more than the job itself is kept.
LIFE_AFTER_END_SECONDS = 25 * 3600
#: Room comes when records go, which nobody can tell before; it is worth a look now and then.
_FULL_PAUSE_SECONDS = 60.0


class ResponseStore:
    """The records of one tenant; every call raises ``BrokerUnavailable`` as the SDK's do."""

    def __init__(self, url: str | None, *, tenant: str, shared: AsyncShared) -> None:
        endpoint = find_endpoint(url, tenant, None)
        self._tenant = endpoint.tenant
        self._links = shared.links(endpoint)

    async def put(self, job_id: str, data: bytes) -> ResponseRecord | None:
        """Keep an encoded record, unless the job has one already, which is returned then.

        Raises ``QueueFull`` if the records of the tenant, or of all, have no room for it.
        """
        call = calls.put_response(
            keys_of(job_id), self._tenant, job_id, data, ttl_ms=LIFE_SECONDS * 1000
        )
        kept = await self._links.of(job_id).call(call)
        if kept.lacking:
            raise _full(kept)
        return read_record(kept.known) if kept.known else None

    async def get(self, job_id: str) -> ResponseRecord:
        """Return the record of a job; raises ``NoSuchObject``."""
        link, key = self._links.of(job_id), self._key(job_id)
        data = await link.retry(lambda: link.client.get(key))
        if not isinstance(data, bytes):
            raise no_response(response_id(job_id))
        return read_record(data)

    async def note_end(self, job_id: str) -> None:
        """Let a record go with its job, which has ended."""
        call = calls.end_response(
            keys_of(job_id), self._tenant, job_id, ttl_ms=LIFE_AFTER_END_SECONDS * 1000
        )
        await self._links.of(job_id).call(call)

    async def delete(self, job_id: str) -> None:
        """Forget a record; one that is gone is as good."""
        call = calls.drop_response(keys_of(job_id), self._tenant, job_id)
        await self._links.of(job_id).call(call)

    def _key(self, job_id: str) -> str:
        return keys_of(job_id).response(self._tenant, job_id)


def _full(kept: calls.Kept) -> QueueFull:
    whose = "the tenant's" if kept.lacking == "tenant" else "all tenants'"
    return QueueFull(
        f"what is kept of {whose} responses takes {kept.used} bytes, the limit is {kept.limit}",
        retry_after_seconds=_FULL_PAUSE_SECONDS,
        fix="Set store to false, delete responses, or wait until some have expired.",
    )
