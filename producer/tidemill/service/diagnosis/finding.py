"""What one check says."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is; only a failure is a reason to stop and repair."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: one line on what is, one on what to do about it."""

    check: str
    level: Level
    finding: str
    fix: str = ""


def ok(check: str, finding: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, finding)


def warning(check: str, finding: str, fix: str) -> Finding:
    """Something to look at."""
    return Finding(check, Level.WARNING, finding, fix)


def failure(check: str, finding: str, fix: str) -> Finding:
    """Jobs are lost, stuck or refused, or will be."""
    return Finding(check, Level.FAILURE, finding, fix)


def duration(ms: float) -> str:
    """A length of time for people."""
    seconds = ms / 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
