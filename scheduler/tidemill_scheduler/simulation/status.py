"""What simulated workers report: light stand-ins for the validated messages of the wire."""

from dataclasses import dataclass
from typing import NamedTuple

from tidemill.protocol.messages import FinishedSequence
from tidemill.protocol.step_cost import StepCost


class SimFinished(NamedTuple):
    """What ``FinishedSequence`` has."""

    job_id: str
    cached_tokens: int
    output_tokens: int
    prompt_tokens: int = 0


class SimKvEvents(NamedTuple):
    """What ``KvEvents`` has."""

    seq: int
    stored: bytes
    evicted: bytes


@dataclass(slots=True)
class SimStatus:
    """What ``WorkerStatus`` has, without the validation that a hundred million steps cannot pay."""

    last_command: str
    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_blocks: int
    step_seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: tuple[FinishedSequence, ...]
    step_cost: StepCost
    num_preemptions: int = 0
    draining: bool = False
    step: None = None
    urgent_tokens: int = 0
