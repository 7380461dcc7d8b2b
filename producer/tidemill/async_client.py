"""The asynchronous twin of ``tidemill.client``."""

from types import TracebackType
from typing import Literal, Self

from tidemill._async_bulk import AsyncBulk
from tidemill._async_jobs import AsyncJobs
from tidemill._async_link import AsyncLinks
from tidemill._async_shared import AsyncShared
from tidemill._async_submitter import AsyncSubmitter
from tidemill._endpoint import find_endpoint
from tidemill._large_audio import AudioShelf
from tidemill._patience import DEFAULT_TIMEOUT_SECONDS
from tidemill._producer.async_answers import AsyncAnswers
from tidemill._producer.async_job_lists import AsyncJobLists
from tidemill._producer.async_maps import AsyncMaps
from tidemill._producer.async_shard_view import AsyncShardView
from tidemill._producer.async_single_jobs import AsyncSingleJobs
from tidemill._producer.async_submissions import AsyncSubmissions
from tidemill._receipt import check_durability
from tidemill.async_watch import AsyncWatches
from tidemill.service.tokenizer_cache import TokenizerStore


class AsyncProducer(
    AsyncAnswers, AsyncSubmissions, AsyncMaps, AsyncSingleJobs, AsyncJobLists, AsyncShardView
):
    """Submits jobs for one tenant and follows them, on one subscribed connection a shard.

    One answer: ``generate``.  A job to follow, to end or to find again: ``submit``.  A dataset:
    ``map``.  Many jobs now, their results later: ``batch``.  Other kinds of models: ``embed``,
    ``score``, ``rerank``, ``transcribe``.

    ``url`` defaults to ``TIDEMILL_REDIS_URL``, then to the embedded server's address.  Every call
    raises ``BrokerUnavailable`` if the broker stays away for ``timeout`` seconds.  With
    ``durability="replica"`` submitting waits up to half a second for a replica to have the jobs;
    ``Job.durability`` tells whether one does.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        tenant: str = "default",
        shard: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        durability: Literal["replica"] | None = None,
        _shared: AsyncShared | None = None,
    ) -> None:
        replicated = check_durability(durability)
        endpoint = find_endpoint(url, tenant, shard)
        self._keys, self._tenant = endpoint.keys, endpoint.tenant
        self._owns_links = _shared is None
        self._shelf = AudioShelf(endpoint.url, tenant)
        self._links = AsyncLinks(endpoint, timeout) if _shared is None else _shared.links(endpoint)
        store = TokenizerStore(endpoint.cache_dir) if _shared is None else _shared.tokenizers
        self._submitter = AsyncSubmitter(self._links.home, endpoint, store, replicated=replicated)
        self._jobs = AsyncJobs(self._links, self._submitter)
        self._watches = AsyncWatches()
        self._maps: set[AsyncBulk] = set()

    async def close(self) -> None:
        """End what ``map`` and ``watch`` do here, and close the connections; other jobs go on."""
        await self._end_maps()
        await self._watches.close()
        if self._owns_links:
            await self._links.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
