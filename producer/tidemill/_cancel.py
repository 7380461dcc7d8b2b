"""Cancelling a job wherever it is; pure, shared by both clients."""

from tidemill._reads import Location
from tidemill.protocol import calls
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import keys_of
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.states import FinishReason, JobState
from tidemill.result import not_found

_END = JobEnd(state=JobState.CANCELLED, finish_reason=FinishReason.CANCELLED)

#: Reply code of cancel: the job moved to another worker meanwhile.
MOVED = -2
_GONE = -1


def cancel_call(job_id: str, where: Location | None) -> Call[tuple[int, str]]:
    """Cancel a job that was last seen at ``where``; raises ``JobNotFound`` if it was nowhere."""
    if where is None:
        raise not_found(job_id)
    return calls.cancel(keys_of(job_id), where.ref, worker_id=where.worker_id, end=_END)


def final_state(job_id: str, reply: tuple[int, str]) -> JobState | None:
    """Return the job's final state, or None if it moved; raises ``JobNotFound``."""
    code, detail = reply
    if code == _GONE:
        raise not_found(job_id)
    return None if code == MOVED else JobState(detail)
