"""Ends jobs that can never run."""

from tidemill.protocol import calls
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.states import FinishReason, JobState
from tidemill_scheduler.jobs import WaitingJob


def refuse(
    keys: ShardKeys, job: WaitingJob, error: TidemillError, idempotency_key: str
) -> Call[tuple[int, str]]:
    """Let a queued job end as failed, for the reason that ``error`` tells."""
    end = JobEnd(state=JobState.FAILED, finish_reason=FinishReason.ERROR, error=error.one_line())
    return calls.cancel(
        keys,
        job_id=job.job_id,
        queue=job.queue,
        worker_id="",
        end=end,
        idempotency_key=idempotency_key,
    )
