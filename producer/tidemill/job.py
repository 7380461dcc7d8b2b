"""A handle of one job, for the synchronous client."""

from dataclasses import dataclass, field

from tidemill._callbacks import Callbacks, OnDone, OnError, OnToken
from tidemill._jobs import Jobs
from tidemill._reads import JobStatus
from tidemill._receipt import UNKNOWN, Receipt, estimated_wait
from tidemill.protocol.states import JobState
from tidemill.result import Result
from tidemill.stream import TokenStream
from tidemill.watch import Watch, Watches


@dataclass(frozen=True, slots=True)
class Job:
    """A name for one job of a ``Producer``; it may be dropped, and made again from its id.

    ``is_new`` is false if submit found the job by its idempotency key.  ``durability`` is the level
    at which it was accepted: ``replica``, ``fsync``, ``fast``, ``none`` or ``unknown``.

    A handle that submit returned does more than one made from an id: if the server restarts or is
    replaced and has lost the job, ``stream``, ``result`` and ``status`` submit the same job again.
    They raise ``ResultExpired`` if it is missing for any other reason.
    """

    id: str
    is_new: bool = False
    durability: str = UNKNOWN
    _jobs: Jobs = field(kw_only=True, repr=False, compare=False)
    _watches: Watches = field(kw_only=True, repr=False, compare=False)
    _receipt: Receipt | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def estimated_wait(self) -> float | None:
        """Seconds from its submission for which the job was likely to wait for a worker.

        The scheduler worked it out from what waited then, the tenant's share and how fast jobs end;
        jobs that come later may change it.  None if it is unknown: there was no scheduler, the
        handle was made from an id, or the job was found by its idempotency key.
        """
        return estimated_wait(self._receipt)

    @property
    def deadline_at_risk(self) -> bool:
        """Whether the job was likely to wait beyond its deadline; it is accepted all the same."""
        return self._receipt is not None and self._receipt.deadline_at_risk

    def stream(self, *, after: str | int = 0, timeout: float | None = None) -> TokenStream:
        """Iterate over the output as it comes; see ``Producer.stream``."""
        return self._jobs.stream(self.id, after, timeout, self._receipt)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole output; see ``Producer.result``."""
        return self._jobs.result(self.id, timeout, self._receipt)

    def watch(
        self,
        *,
        on_token: OnToken | None = None,
        on_done: OnDone | None = None,
        on_error: OnError | None = None,
        after: str | int = 0,
    ) -> Watch:
        """Call functions as the job goes on, and return at once.

        ``on_token`` gets each ``Chunk`` of the output behind ``after``; at the end ``on_done`` gets
        the ``Result``, or ``on_error`` the error that ``result`` would raise, such as ``JobFailed``
        with the partial output.  Each job's calls come in order, and once each.  All watches of a
        producer share one thread, which they run on: a function that takes long delays the others,
        and an error of it ends its watch, is logged and raised by ``Watch.wait``.  Closing the
        producer ends its watches, not the jobs.
        """
        watches = self._watches
        return watches.start(self.id, self._receipt, after, Callbacks(on_token, on_done, on_error))

    def cancel(self) -> JobState:
        """End the job now; see ``Producer.cancel``."""
        return self._jobs.cancel(self.id)

    def status(self) -> JobStatus:
        """Look at the job once; see ``Producer.job_status``."""
        return self._jobs.status(self.id, self._receipt)
