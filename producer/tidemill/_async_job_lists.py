"""The asynchronous twin of ``tidemill._job_lists``."""

from collections.abc import AsyncIterator, Iterable

from tidemill._async_link import AsyncLinks
from tidemill._reads import JobStatus
from tidemill.job_list import (
    DEFAULT_PAGE,
    MAX_PAGE,
    JobPage,
    WantedJobs,
    checked_limit,
    job_page,
)
from tidemill.protocol.keys import ShardKeys


class AsyncJobLists:
    """The lists of an ``AsyncProducer``."""

    _links: AsyncLinks
    _keys: ShardKeys
    _tenant: str

    async def job_page(
        self,
        *,
        state: str | Iterable[str] | None = None,
        batch: str | None = None,
        after: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> JobPage:
        """List some of the tenant's jobs, the newest first, behind the job ``after``.

        Those in a ``state``, or in one of several, and of a ``batch``, if these are given; lines of
        batch objects are not listed.  Raises ``InvalidRequest``.
        """
        plan = job_page(
            self._keys,
            self._tenant,
            WantedJobs.of(state, batch),
            after=after,
            limit=checked_limit(limit),
        )
        return await self._links.home.carry_out(plan)

    async def jobs(
        self, *, state: str | Iterable[str] | None = None, batch: str | None = None
    ) -> AsyncIterator[JobStatus]:
        """Iterate over the tenant's jobs, the newest first; see ``job_page``."""
        states = state if state is None or isinstance(state, str) else tuple(state)
        after, has_more = None, True
        while has_more:
            page = await self.job_page(state=states, batch=batch, after=after, limit=MAX_PAGE)
            for status in page.jobs:
                yield status
            after, has_more = page.last_id, page.has_more
