"""Figures of a run: how long recovery takes, and how jobs ended."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.history import Event
from chaos.plan import LEASE_SECONDS, LINK_FAULTS, MAX_CRASHES
from chaos.tokenlog import entries_of
from chaos.verdict import Run


@dataclass
class Measures:
    """Times in seconds; ``takeover`` from a worker's death to the next claim of each of its jobs,
    ``failover`` from a leader's death to the next leader's term, ``cancel`` from the call to the
    terminal state, ``wait`` from acceptance to the first token, ``restart`` of the broker until it
    has loaded its data.  ``undisturbed`` are the takeovers during which nothing else was broken,
    of jobs that were not tried alone because their workers had died before.
    """

    states: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    takeover: list[float] = field(default_factory=list)
    failover: list[float] = field(default_factory=list)
    cancel: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_accepted: int = 0
    num_followed: int = 0

    def lines(self) -> list[str]:
        """The figures as a reader wants them."""
        states = ", ".join(f"{state} {n}" for state, n in self.states.most_common())
        retried = sum(n for attempt, n in self.attempts.items() if attempt > 1)
        most = max(self.attempts, default=0)
        return [
            f"{self.num_accepted} accepted: {states}; {self.num_tokens} tokens;"
            f" {retried} jobs took several attempts, at most {most};"
            f" {self.num_followed} subscribers",
            *(
                f"{name}: {summary(values)}"
                for name, values in (
                    ("takeover of a dead worker's jobs", self.takeover),
                    ("takeover while nothing else was broken", self.undisturbed),
                    ("scheduler failover", self.failover),
                    ("cancel", self.cancel),
                    ("wait for the first token", self.wait),
                    ("broker restart with its data", self.restart),
                )
            ),
        ]


def measure(run: Run) -> Measures:
    """Compute the figures of a run."""
    measures = Measures()
    measures.num_accepted = len(run.accepted)
    for stored in run.truth.jobs.values():
        measures.states[stored.get("st", b"gone").decode()] += 1
        measures.attempts[int(stored.get("at", b"0"))] += 1
        measures.num_tokens += int(stored.get("n", b"0"))
        if "tf" in stored:
            measures.wait.append((int(stored["tf"]) - int(stored["ts"])) / 1000)
    measures.num_followed = sum(bool(sight.ends) for sight in run.sights.values())
    takeovers = _takeovers(run)
    measures.takeover = [seconds for _, seconds, _ in takeovers]
    measures.undisturbed = _undisturbed(run, takeovers)
    measures.restart = [event["load"] for event in run.of("broker_up")]
    measures.failover = _failovers(run)
    measures.cancel = [
        events[-1]["t"] - events[-2]["t"]
        for events in run.cancels.values()
        if len(events) > 1 and events[-1]["e"] == "cancelled" and events[-2]["e"] == "cancel"
    ]
    return measures


def _takeovers(run: Run) -> list[tuple[float, float, int]]:
    """(time of death, seconds until the next claim, attempts) of jobs whose worker died.

    Only the last dispatch of a job has a time in its hash, so only its last takeover counts.
    """
    deaths = {e["name"]: e for e in run.of("exit") if e["status"] != 0}
    takeovers = []
    for job_id, stored in run.truth.jobs.items():
        claims = [e.claimant for e in entries_of(run, job_id) if e.claimant is not None]
        death = deaths.get(run.workers.get(claims[-2], "")) if len(claims) > 1 else None
        seconds = int(stored.get("td", b"0")) / 1000 - death["wall"] if death else 0.0
        if death and seconds > 0:
            takeovers.append((death["t"], seconds, int(stored["at"])))
    return takeovers


def _undisturbed(run: Run, takeovers: Sequence[tuple[float, float, int]]) -> list[float]:
    disturbances = [e["t"] for e in run.of("fault") if not _is_harmless(e)]
    disturbances += [e["t"] for e in run.of("broker_up")]
    disturbances += [e["t"] for e in run.of("exit") if e["name"].startswith("scheduler")]
    quiet = []
    for died, seconds, attempts in takeovers:
        # A new leader waits one lease before it takes anything away.
        since, until = died - 2 * LEASE_SECONDS, died + seconds
        if attempts < MAX_CRASHES and not any(since < t < until for t in disturbances):
            quiet.append(seconds)
    return quiet


def _is_harmless(fault: Event) -> bool:
    return fault["name"] in ("kill_worker", "kill_producer", "pause_producer") or (
        fault["role"] == "producer" and fault["name"] in LINK_FAULTS
    )


def _failovers(run: Run) -> list[float]:
    leads = run.of("lead")
    exits = {e["name"]: e["t"] for e in run.of("exit") if e["status"] != 0}
    times = []
    for before, after in itertools.pairwise(leads):
        died = exits.get(before["name"])
        if died is not None and before["t"] < died < after["t"]:
            times.append(after["t"] - died)
    return times


def summary(values: Sequence[float]) -> str:
    """Median, p99 and maximum."""
    if not values:
        return "none"
    ordered = sorted(values)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return (
        f"p50 {ordered[len(ordered) // 2]:.2f} s, p99 {p99:.2f} s, max {ordered[-1]:.2f} s"
        f" ({len(ordered)})"
    )
