"""What is asked of a cell of the benchmark, and whether it was reached."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scheduling_runs import Outcome, Spec

from tidemill_scheduler.simulation.report import Report

Measure = Callable[[Report], float]


@dataclass(frozen=True)
class Figure:
    """A number for each seed, and what it must reach; without a target it is information."""

    what: str
    values: tuple[float, ...]
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        """The one in the middle of the seeds."""
        return statistics.median(self.values)

    @property
    def worst(self) -> float:
        """The one furthest from the target."""
        return max(self.values) if self.at_least is None else min(self.values)

    @property
    def target(self) -> str:
        """The target as text."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def is_met(self) -> bool | None:
        """Whether every seed reaches the target, None without one."""
        if self.at_least is not None:
            return self.worst >= self.at_least
        return None if self.at_most is None else self.worst <= self.at_most


class Results:
    """The outcomes of a cell, by seed and by the label that the cell gave the run."""

    def __init__(self, by_seed: Sequence[Mapping[str, Outcome]]) -> None:
        self.by_seed = by_seed

    @property
    def labels(self) -> list[str]:
        """All runs, in the order of the cell."""
        return list(dict.fromkeys(label for outcomes in self.by_seed for label in outcomes))

    def outcomes(self, label: str) -> list[Outcome]:
        """The outcomes of one run, by seed."""
        return [outcomes[label] for outcomes in self.by_seed if label in outcomes]

    def values(self, label: str, measure: Measure) -> tuple[float, ...]:
        """Return a measure of one run, by seed."""
        return tuple(measure(outcome.report) for outcome in self.outcomes(label))

    def ratios(self, above: str, below: str, measure: Measure) -> tuple[float, ...]:
        """Return a measure of one run as a multiple of another's, by seed."""
        pairs = [(o[above], o[below]) for o in self.by_seed if above in o and below in o]
        return tuple(measure(a.report) / measure(b.report) for a, b in pairs)

    def points(self, first: str, second: str, measure: Measure) -> tuple[float, ...]:
        """Return by how many points a share of one run is above that of another, by seed."""
        pairs = [(o[first], o[second]) for o in self.by_seed if first in o and second in o]
        return tuple(100 * (measure(a.report) - measure(b.report)) for a, b in pairs)


@dataclass(frozen=True)
class Scope:
    """How much to measure: the seeds, the share of the jobs, and whether nothing is left out."""

    seeds: tuple[int, ...]
    scale: float = 1.0
    is_full: bool = False

    def is_lead(self, seed: int) -> bool:
        """Whether runs belong to this seed that are too long to be made for each of them."""
        return self.is_full or seed == self.seeds[0]


@dataclass(frozen=True)
class Cell:
    """Runs that belong together, by label, and the figures drawn from them."""

    name: str
    title: str
    runs: Callable[[int, Scope], dict[str, Spec]]
    figures: Callable[[Results], list[Figure]]
    is_online: bool = False


def makespan(report: Report) -> float:
    """Seconds until the last job has ended."""
    return report.makespan


def hit_share(report: Report) -> float:
    """Share of the prompt tokens that a cache had."""
    return report.hit_share


def percent_of_bound(report: Report) -> float:
    """The hit share as per cent of what a cache without end would have."""
    return 100 * report.share_of_bound


def mean_ttft(report: Report) -> float:
    """Mean seconds to the first token."""
    return report.ttft.mean


def longest_wait(report: Report) -> float:
    """Seconds that the job waited which waited longest; a millisecond if none did, to compare."""
    return max(report.wait.max, 0.001)


def computed(report: Report) -> float:
    """Prompt tokens computed, those of lost attempts included."""
    return float(report.computed_tokens)
