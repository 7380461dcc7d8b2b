"""Ends jobs that can never run."""

from tidemill.protocol import calls
from tidemill.protocol.calls import JobRef
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.states import FinishReason, JobState


def refuse(
    keys: ShardKeys, ref: JobRef, error: TidemillError, *, epoch: int
) -> Call[tuple[int, str]]:
    """Let a queued job end as failed, for the reason that ``error`` tells.

    Raises ``StaleEpoch`` if another scheduler leads by now: it knows better.
    """
    end = JobEnd(state=JobState.FAILED, finish_reason=FinishReason.ERROR, error=error.one_line())
    return calls.refuse(keys, ref, epoch=epoch, end=end)
