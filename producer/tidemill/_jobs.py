"""What can be done with single jobs, wherever they are; those the server lost are brought back."""

import time
from collections.abc import Sequence

from tidemill._cancel import cancel_call, final_state
from tidemill._checks import check_job_id, check_timeout
from tidemill._link import Links
from tidemill._reads import JobStatus, job_status, location
from tidemill._receipt import Receipt
from tidemill._request import JobSpec
from tidemill._rescue import Rescue
from tidemill._results import LONG_SECONDS, ResultGroup
from tidemill._submitter import Submitter
from tidemill.protocol.calls import NewJob
from tidemill.protocol.errors import (
    BrokerError,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFinished,
    TidemillError,
)
from tidemill.protocol.keys import keys_of
from tidemill.protocol.states import JobState
from tidemill.result import Result, not_found
from tidemill.stream import TokenStream


class Jobs:
    """The jobs of one client.

    With a ``receipt`` a job that the server lost is submitted again; see ``tidemill._receipt``.
    """

    def __init__(self, links: Links, submitter: Submitter) -> None:
        self._links = links
        self._submitter = submitter

    def stream(
        self, job_id: str, after: str | int, timeout: float | None, receipt: Receipt | None = None
    ) -> TokenStream:
        """Iterate over a job's output."""
        check_job_id(job_id)
        check_timeout(timeout)
        link, rescue = self._links.of(job_id), self._rescue(receipt)
        return TokenStream(link, job_id, after=after, timeout=timeout, rescue=rescue)

    def result(self, job_id: str, timeout: float | None, receipt: Receipt | None = None) -> Result:
        """Wait for a job's whole output."""
        check_job_id(job_id)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with ResultGroup(self._links.of(job_id), self._submitter) as group:
            group.add(job_id, receipt)
            while not (finished := group.wait(_left(deadline))):
                if deadline is not None and time.monotonic() >= deadline:
                    raise JobNotFinished(f"{job_id} is not finished yet", job_id=job_id)
        outcome = finished[job_id]
        if isinstance(outcome, TidemillError):
            raise outcome
        return outcome

    def ask(self, spec: JobSpec, timeout: float | None) -> Result:
        """Run one job; whatever cuts the waiting short cancels it, unless it has a key."""
        made = self._submitter.make([spec])
        try:
            [receipt] = self._submitter.send(made)
            if isinstance(receipt, Receipt):
                return self.result(receipt.job_id, timeout, receipt)
        except (JobCancelled, JobFailed, BrokerError):
            raise
        except BaseException:
            if not spec.has_key:
                self._give_up(made)
            raise
        raise receipt

    def _give_up(self, made: Sequence[NewJob | InvalidRequest]) -> None:
        # However far the sending got: once this is answered, nothing of it is on its way.
        for receipt in self._submitter.send(made):
            if isinstance(receipt, Receipt):
                self.cancel(receipt.job_id)

    def status(self, job_id: str, receipt: Receipt | None = None) -> JobStatus:
        """Look at a job once."""
        check_job_id(job_id)
        read, rescue = job_status(keys_of(job_id), job_id), self._rescue(receipt)
        link = self._links.of(job_id)
        while (found := link.read(read)) is None:
            if rescue is None:
                raise not_found(job_id)
            rescue.bring_back(time.monotonic() + link.timeout)
        if rescue is not None and found.state.is_terminal:
            rescue.note_end()
        return found

    def cancel(self, job_id: str) -> JobState:
        """End a job now and return its final state; nothing brings it back."""
        check_job_id(job_id)
        self._submitter.fates.cancel(job_id)
        link = self._links.of(job_id)
        while True:
            where = link.read(location(keys_of(job_id), job_id))
            state = final_state(job_id, link.call(cancel_call(job_id, where)))
            if state is not None:
                return state

    def _rescue(self, receipt: Receipt | None) -> Rescue | None:
        return None if receipt is None else Rescue(self._submitter, receipt)


def _left(deadline: float | None) -> float:
    return LONG_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
