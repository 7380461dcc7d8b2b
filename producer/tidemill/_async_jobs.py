"""The asynchronous twin of ``tidemill._jobs``."""

import time
from collections.abc import Sequence

from tidemill._async_driver import AsyncDriver
from tidemill._async_link import AsyncLinks
from tidemill._async_rescue import AsyncRescue
from tidemill._async_submitter import AsyncSubmitter
from tidemill._await_result import ResultFollower
from tidemill._cancel import cancel_call, final_state
from tidemill._checks import check_job_id, check_timeout
from tidemill._reads import JobStatus, job_status, location
from tidemill._receipt import Receipt
from tidemill._request import JobSpec
from tidemill.async_stream import AsyncTokenStream
from tidemill.protocol.calls import NewJob
from tidemill.protocol.errors import BrokerError, InvalidRequest, JobCancelled, JobError, JobFailed
from tidemill.protocol.keys import keys_of
from tidemill.protocol.states import JobState
from tidemill.result import Result, not_found, outcome_of


class AsyncJobs:
    """The jobs of one client; see ``Jobs``."""

    def __init__(self, links: AsyncLinks, submitter: AsyncSubmitter) -> None:
        self._links = links
        self._submitter = submitter

    def stream(
        self, job_id: str, after: str | int, timeout: float | None, receipt: Receipt | None = None
    ) -> AsyncTokenStream:
        """Iterate over a job's output."""
        check_job_id(job_id)
        check_timeout(timeout)
        link, rescue = self._links.of(job_id), self._rescue(receipt)
        return AsyncTokenStream(
            link,
            job_id,
            after=after,
            timeout=timeout,
            rescue=rescue,
            # One that was found by its key may have ended.
            is_fresh=receipt is not None and receipt.created and not after,
        )

    async def result(
        self, job_id: str, timeout: float | None, receipt: Receipt | None = None
    ) -> Result:
        """Wait for a job's whole output."""
        check_job_id(job_id)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        follower, rescue = ResultFollower(job_id), self._rescue(receipt)
        driver = AsyncDriver(self._links.of(job_id), follower, rescue)
        try:
            while follower.result is None:
                await driver.advance(deadline)
        finally:
            driver.close()
        if rescue is not None:
            rescue.note_end()
        outcome = outcome_of(follower.result)
        if isinstance(outcome, JobError):
            raise outcome
        return outcome

    async def ask(self, spec: JobSpec, timeout: float | None) -> Result:
        """Run one job; whatever cuts the waiting short cancels it, unless it has a key."""
        made = await self._submitter.make([spec])
        try:
            [receipt] = await self._submitter.send(made)
            if isinstance(receipt, Receipt):
                return await self.result(receipt.job_id, timeout, receipt)
        except (JobCancelled, JobFailed, BrokerError):
            raise
        except BaseException:
            if not spec.has_key:
                await self._give_up(made)
            raise
        raise receipt

    async def _give_up(self, made: Sequence[NewJob | InvalidRequest]) -> None:
        # However far the sending got: once this is answered, nothing of it is on its way.
        for receipt in await self._submitter.send(made):
            if isinstance(receipt, Receipt):
                await self.cancel(receipt.job_id)

    async def status(self, job_id: str, receipt: Receipt | None = None) -> JobStatus:
        """Look at a job once."""
        check_job_id(job_id)
        read, rescue = job_status(keys_of(job_id), job_id), self._rescue(receipt)
        link = self._links.of(job_id)
        while (found := await link.read(read)) is None:
            if rescue is None:
                raise not_found(job_id)
            await rescue.bring_back(time.monotonic() + link.timeout)
        if rescue is not None and found.state.is_terminal:
            rescue.note_end()
        return found

    async def cancel(self, job_id: str) -> JobState:
        """End a job now and return its final state; nothing brings it back."""
        check_job_id(job_id)
        self._submitter.fates.cancel(job_id)
        link = self._links.of(job_id)
        while True:
            where = await link.read(location(keys_of(job_id), job_id))
            state = final_state(job_id, await link.call(cancel_call(job_id, where)))
            if state is not None:
                return state

    def _rescue(self, receipt: Receipt | None) -> AsyncRescue | None:
        return None if receipt is None else AsyncRescue(self._submitter, receipt)
