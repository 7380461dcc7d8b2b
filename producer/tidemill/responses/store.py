"""Where the records of responses are kept: in Redis, each with an owner and a life."""

from tidemill._async_shared import AsyncShared
from tidemill._endpoint import find_endpoint
from tidemill.protocol.keys import keys_of
from tidemill.responses.record import ResponseRecord, no_response, read_record, response_id

#: From the creation; a job may wait for so long.
LIFE_SECONDS = 30 * 24 * 3600
#: From when the end was told first: a little more than the job itself is kept.
LIFE_AFTER_END_SECONDS = 25 * 3600


class ResponseStore:
    """The records of one tenant; every call raises ``BrokerUnavailable`` as the SDK's do."""

    def __init__(self, url: str | None, *, tenant: str, shared: AsyncShared) -> None:
        endpoint = find_endpoint(url, tenant, None)
        self._tenant = endpoint.tenant
        self._links = shared.links(endpoint)

    async def put(self, job_id: str, data: bytes) -> ResponseRecord | None:
        """Keep an encoded record, unless the job has one already, which is returned then."""
        link, key = self._links.of(job_id), self._key(job_id)
        kept = await link.retry(
            lambda: link.client.set(key, data, nx=True, get=True, ex=LIFE_SECONDS)
        )
        return read_record(kept) if isinstance(kept, bytes) else None

    async def get(self, job_id: str) -> ResponseRecord:
        """Return the record of a job; raises ``NoSuchObject``."""
        link, key = self._links.of(job_id), self._key(job_id)
        data = await link.retry(lambda: link.client.get(key))
        if not isinstance(data, bytes):
            raise no_response(response_id(job_id))
        return read_record(data)

    async def note_end(self, job_id: str) -> None:
        """Let a record go with its job, which has ended."""
        link, key = self._links.of(job_id), self._key(job_id)
        await link.retry(lambda: link.client.expire(key, LIFE_AFTER_END_SECONDS, lt=True))

    async def delete(self, job_id: str) -> None:
        """Forget a record; one that is gone is as good."""
        link, key = self._links.of(job_id), self._key(job_id)
        await link.retry(lambda: link.client.delete(key))

    def _key(self, job_id: str) -> str:
        return keys_of(job_id).response(self._tenant, job_id)
