"""The synchronous client: submit jobs, follow them, collect their results."""

from collections.abc import Generator
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakSet

from tidemill._endpoint import find_endpoint
from tidemill._jobs import Jobs
from tidemill._large_audio import AudioShelf
from tidemill._link import Links
from tidemill._patience import DEFAULT_TIMEOUT_SECONDS
from tidemill._producer.answers import Answers
from tidemill._producer.job_lists import JobLists
from tidemill._producer.maps import Maps
from tidemill._producer.shard_view import ShardView
from tidemill._producer.single_jobs import SingleJobs
from tidemill._producer.submissions import Submissions
from tidemill._receipt import check_durability
from tidemill._submitter import Submitter
from tidemill.watch import Watches


class Producer(Answers, Submissions, Maps, SingleJobs, JobLists, ShardView):
    """Submits jobs for one tenant and follows them; safe to share between threads.

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
    ) -> None:
        replicated = check_durability(durability)
        endpoint = find_endpoint(url, tenant, shard)
        self._keys, self._tenant = endpoint.keys, endpoint.tenant
        self._links = Links(endpoint, timeout)
        self._shelf = AudioShelf(endpoint.url, tenant)
        self._submitter = Submitter(self._links.home, endpoint, replicated=replicated)
        self._jobs = Jobs(self._links, self._submitter)
        self._watches = Watches(endpoint, timeout, replicated=replicated)
        self._maps: WeakSet[Generator[Any, None, None]] = WeakSet()

    def close(self) -> None:
        """End what ``map`` and ``watch`` do here, and close the connections; other jobs go on."""
        self._end_maps()
        self._watches.close()
        self._links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
