"""What whoever runs jobs needs of an engine, whatever kind of jobs it is for."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol

from tidemill.protocol.kv_use import KvUse
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import KvEvents, KvSnapshot
from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.step_cost import StepCost


class Work(Protocol):
    """One job inside an engine, and what it has cost there so far."""

    @property
    def seq_id(self) -> str:
        """The job's id."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its input."""

    @property
    def num_cached_tokens(self) -> int | None:
        """Those of them that were cached; None if that is not known yet."""

    @property
    def output_ids(self) -> Sequence[int]:
        """All tokens of its output, those of earlier attempts first."""

    @property
    def num_resumed_tokens(self) -> int:
        """How many of them earlier attempts generated."""


class Finish(Protocol):
    """Why a job ended."""

    @property
    def reason(self) -> str:
        """The finish reason: ``stop`` or ``length``."""

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it, if one did."""


class WorkOutput(Protocol):
    """What one step did for one job."""

    @property
    def seq(self) -> Work:
        """The job."""

    @property
    def new_ids(self) -> tuple[int, ...]:
        """Its new tokens."""

    @property
    def text(self) -> str:
        """Text that became certain."""

    @property
    def finish(self) -> Finish | None:
        """Set once the job has ended."""

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One per new token if the job asked for them."""

    @property
    def outcome(self) -> Outcome | None:
        """What a job of another kind than *generate* was for, with its end."""


class CacheView(Protocol):
    """What an engine keeps between jobs, as far as others are told of it."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that new jobs can have."""

    @property
    def usage(self) -> float:
        """Share of the blocks in use."""

    def hint(self, refs: Mapping[bytes, int], /) -> None:
        """Take in how many waiting jobs will use the prefix up to each routing hash."""

    def collect_events(self) -> KvEvents | None:
        """Return what changed since the last call."""

    def snapshot(self) -> KvSnapshot:
        """Return all that can be found in the cache."""


class StepQueue(Protocol):
    """The jobs of an engine, in the order in which its steps take them."""

    @property
    def running(self) -> Sized:
        """Jobs that have begun."""

    @property
    def waiting(self) -> Sized:
        """Jobs that have not."""

    @property
    def num_waiting_tokens(self) -> int:
        """Input tokens that were accepted and not computed yet."""

    @property
    def num_urgent_tokens(self) -> int:
        """Those of them that belong to interactive jobs."""

    @property
    def block_manager(self) -> CacheView:
        """The cache."""

    @property
    def kv_use(self) -> KvUse | None:
        """How well the KV cache is used, between steps; None without one."""


class Figures(Protocol):
    """Counts since the engine's start."""

    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int


class Learner(Protocol):
    """What an engine has learned of its own steps."""

    @property
    def fitted(self) -> StepCost | None:
        """The latest fit, None before the first one."""


class JobEngine(Protocol):
    """Runs jobs, several in a step; one thread adds, aborts and steps."""

    @property
    def step_scheduler(self) -> StepQueue:
        """The jobs in here."""

    @property
    def figures(self) -> Any:
        """Counts since the start: ``EngineFigures``."""

    @property
    def learner(self) -> Learner:
        """What it has learned of its steps."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to tell."""

    def add(self, work: Any, /) -> None:
        """Take in a job; raises ``InvalidRequest`` if it can never run."""

    def abort(self, seq_id: str, /) -> Work | None:
        """Drop a job; returns it, or None if it has ended or was never here."""

    def step(self) -> Sequence[WorkOutput]:
        """Run one step; if it raises, abort all jobs and add them again."""
