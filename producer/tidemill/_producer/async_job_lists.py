"""The asynchronous twin of ``tidemill._producer.job_lists``."""

from collections.abc import AsyncIterator, Iterable

from tidemill._async_link import AsyncLinks
from tidemill._async_submitter import AsyncSubmitter
from tidemill._reads import JobStatus
from tidemill._sweep import cancel_batch, cancel_tenant
from tidemill._terms import check_batch
from tidemill.batch import CancelCounts
from tidemill.job_list import DEFAULT_PAGE, MAX_PAGE, JobPage, WantedJobs, checked_limit, job_page
from tidemill.protocol.keys import ShardKeys


class AsyncJobLists:
    """The calls of an ``AsyncProducer`` about many jobs; see ``JobLists``."""

    _keys: ShardKeys
    _tenant: str
    _links: AsyncLinks
    _submitter: AsyncSubmitter

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

    async def cancel_batch(self, name: str) -> CancelCounts:
        """End all jobs of a batch now, and let no more into it; their partial output is kept.

        Jobs submitted to it from now on raise ``BatchClosed``.
        """
        plan = cancel_batch(self._keys, self._tenant, check_batch(name))
        self._submitter.fates.cancel_all(batch=name)
        return await self._links.home.carry_out(plan)

    async def cancel_tenant(self) -> CancelCounts:
        """End all jobs now that the tenant has submitted before; their partial output is kept."""
        self._submitter.fates.cancel_all()
        return await self._links.home.carry_out(cancel_tenant(self._keys, self._tenant))
