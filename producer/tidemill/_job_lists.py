"""What a producer knows of all the jobs of its tenant."""

from collections.abc import Iterable, Iterator

from tidemill._link import Links
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


class JobLists:
    """The lists of a ``Producer``."""

    _links: Links
    _keys: ShardKeys
    _tenant: str

    def job_page(
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
        return self._links.home.carry_out(plan)

    def jobs(
        self, *, state: str | Iterable[str] | None = None, batch: str | None = None
    ) -> Iterator[JobStatus]:
        """Iterate over the tenant's jobs, the newest first; see ``job_page``."""
        states = state if state is None or isinstance(state, str) else tuple(state)
        after, has_more = None, True
        while has_more:
            page = self.job_page(state=states, batch=batch, after=after, limit=MAX_PAGE)
            yield from page.jobs
            after, has_more = page.last_id, page.has_more
