"""How jobs of other kinds than *generate* come into their engines."""

from dataclasses import dataclass
from typing import Any, Protocol

from tidemill.protocol.requests import Request
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.job_engine import Work


@dataclass(frozen=True, slots=True)
class KindJob:
    """A job of another kind than *generate*; ``inputs`` are what its engine reads."""

    job_id: str
    request: Request
    inputs: Any


class KindWork(Protocol):
    """Makes work for an engine of such jobs."""

    def prepare(self, request: Request, /) -> Any:
        """Return what the engine reads; raises ``InvalidRequest``.  On the reader's thread."""

    def start(self, given: KindJob, generated: Generated, /) -> Work:
        """Return the job as the engine takes it, with what earlier attempts generated."""

    def smallest(self, seq_id: str, /) -> Work:
        """Return a job that tells whether the engine computes anything at all."""
