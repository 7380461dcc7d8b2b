"""Bringing a job back that the server accepted and then lost."""

import time

from tidemill._receipt import Receipt
from tidemill._submitter import Submitter
from tidemill.protocol.errors import JobNotFinished, Overloaded


class Rescue:
    """One reader's way to have its job submitted again."""

    def __init__(self, submitter: Submitter, receipt: Receipt) -> None:
        self._submitter = submitter
        self._receipt = receipt

    def bring_back(self, deadline: float | None) -> None:
        """Submit the missing job again; a full queue is waited for.

        Raises ``ResultExpired`` if the server did not lose it, ``JobNotFinished`` after
        ``deadline``.
        """
        while True:
            [problem] = self._submitter.resubmit([self._receipt])
            if problem is None:
                return
            if not isinstance(problem, Overloaded):
                raise problem
            time.sleep(overload_wait(self._receipt.job_id, problem, deadline))

    def note_end(self) -> None:
        """Say that the reader has seen how the job ended."""
        self._receipt.fate.has_ended = True


def overload_wait(job_id: str, error: Overloaded, deadline: float | None) -> float:
    """Return how long to wait before the next try; raises ``JobNotFinished`` if time is up."""
    if deadline is None:
        return error.retry_after_seconds
    left = deadline - time.monotonic()
    if left <= 0:
        raise JobNotFinished(
            f"{job_id} was lost by the server, and there is no room to submit it again",
            job_id=job_id,
            fix="Wait longer.",
        ) from error
    return min(left, error.retry_after_seconds)
