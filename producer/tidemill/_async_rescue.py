"""The asynchronous twin of ``tidemill._rescue``."""

import asyncio

from tidemill._async_submitter import AsyncSubmitter
from tidemill._receipt import Receipt
from tidemill._rescue import overload_wait
from tidemill.protocol.errors import Overloaded


class AsyncRescue:
    """One reader's way to have its job submitted again."""

    def __init__(self, submitter: AsyncSubmitter, receipt: Receipt) -> None:
        self._submitter = submitter
        self._receipt = receipt

    async def bring_back(self, deadline: float | None) -> None:
        """Submit the missing job again; waits and raises as its twin does."""
        while True:
            [problem] = await self._submitter.resubmit([self._receipt])
            if problem is None:
                return
            if not isinstance(problem, Overloaded):
                raise problem
            await asyncio.sleep(overload_wait(self._receipt.job_id, problem, deadline))

    def note_end(self) -> None:
        """Say that the reader has seen how the job ended."""
        self._receipt.fate.has_ended = True
