"""What the checker works on: a run as one value, and what it finds wrong."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.history import Event, read_history
from chaos.plan import JobPlan, Plan
from chaos.truth import Truth

SEAL = "9007199254740991"
TERMINAL = frozenset({"done", "failed", "cancelled", "dead", "expired"})


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: which invariant, of which job, and how."""

    invariant: str
    job: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.job is None else f" job {self.job}"
        return f"{self.invariant}{where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a token log; ``writer`` is the fence in its id."""

    writer: str
    num_tokens: int
    start: int | None = None
    ids: tuple[int, ...] = ()
    text: str = ""
    claimant: str | None = None
    end: dict[str, Any] | None = None


@dataclass
class Sight:
    """What one subscriber of a job saw."""

    chunks: list[Event] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    result: Event | None = None
    #: How often it had to begin anew, because the log was cut at other places.
    num_rereads: int = 0

    def begin_anew(self) -> None:
        """Forget the chunks seen so far."""
        self.chunks.clear()
        self.num_rereads += 1


@dataclass
class Run:
    """A whole run: what was planned, what the clients saw, what the broker holds."""

    plan: Plan
    events: list[Event]
    truth: Truth
    by_number: dict[int, JobPlan] = field(init=False)
    #: Job number -> the ids under which it was accepted.
    accepted: dict[int, set[str]] = field(init=False)
    sights: dict[int, Sight] = field(init=False)
    cancels: dict[int, list[Event]] = field(init=False)
    workers: dict[str, str] = field(init=False)
    #: Times (from, to) whose acknowledged writes the broker was made to lose.
    losses: list[tuple[float, float]] = field(init=False)
    #: Job id -> when it was submitted, and when its producer knew that it was accepted.
    accepted_within: dict[str, tuple[float, float]] = field(init=False)
    _submitted_at: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self.by_number = {job.number: job for job in self.plan.jobs}
        self.accepted, self.sights = defaultdict(set), defaultdict(Sight)
        self.cancels, self.workers = defaultdict(list), {}
        self.losses, self.accepted_within, self._submitted_at = [], {}, {}
        for event in self.events:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event["e"]:
            case "submit":
                self._submitted_at.update(dict.fromkeys(event["ns"], event["t"]))
            case "accepted":
                number, job_id, known_at = event["n"], event["job"], event["t"]
                self.accepted[number].add(job_id)
                begun_at = self._submitted_at.get(number, known_at)
                self.accepted_within.setdefault(job_id, (begun_at, known_at))
            case "loss":
                self.losses.append((event["since"], event["until"]))
            case "chunk":
                self.sights[event["n"]].chunks.append(event)
            case "reread":
                self.sights[event["n"]].begin_anew()
            case "followed":
                self.sights[event["n"]].ends.append(event)
            case "result":
                self.sights[event["n"]].result = event
            case "cancel" | "cancelled":
                self.cancels[event["n"]].append(event)
            case "ready":
                self.workers[event["worker"]] = event["name"]

    @classmethod
    def load(cls, directory: Path, plan: Plan) -> "Run":
        """Read a recorded run."""
        return cls(plan, read_history(directory), Truth.load(directory / "truth.msgpack"))

    def of(self, event: str) -> list[Event]:
        """The events of one kind in order."""
        return [found for found in self.events if found["e"] == event]

    def may_be_lost(self, job_id: str) -> bool:
        """Whether the broker may have accepted a job when it was made to lose what it had."""
        begun_at, known_at = self.accepted_within[job_id]
        # A busy producer may read the reply long after the broker that sent it was killed.
        return any(since <= known_at and begun_at <= until for since, until in self.losses)

    def number_of(self) -> dict[str, int]:
        """Job id -> number of the accepted jobs."""
        return {job_id: n for n, job_ids in self.accepted.items() for job_id in job_ids}
