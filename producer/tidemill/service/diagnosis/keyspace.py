"""Is every job where it can be found, and does everything else go away by itself?"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.service.diagnosis.finding import Finding, Level, ok

_NUM_EXAMPLES = 3


@dataclass(slots=True)
class Census:
    """What a bounded look at the keys of a shard found; names of keys, jobs or queues."""

    num_keys: int
    num_examined: int = 0
    complete: bool = False
    #: Jobs that are queued but on no stream, delayed without a time or run without a lease: lost.
    lost_jobs: list[str] = field(default_factory=list)
    #: Streams with pointers that no scheduler will read.
    unlisted_queues: list[str] = field(default_factory=list)
    #: Leases and pointers of jobs that are not what these say, or are not at all.
    stale_leases: list[str] = field(default_factory=list)
    stale_pointers: list[str] = field(default_factory=list)
    #: Times to look at jobs that do not wait for one.
    stale_times: list[str] = field(default_factory=list)
    #: Keys that should have a TTL.
    leaks: set[str] = field(default_factory=set)

    @property
    def extent(self) -> str:
        """How much was looked at."""
        if self.complete:
            return f"all {self.num_keys:,} were looked at"
        return (
            f"{self.num_examined:,} of about {self.num_keys:,} were looked at;"
            " --max-keys raises the bound"
        )


def check_census(census: Census | None) -> list[Finding]:
    """Judge what was found; None if this user may not look."""
    if census is None:
        return [
            Finding(
                "keys",
                Level.WARNING,
                "SCAN is forbidden to this user: no look for lost jobs and leaks",
                "Run doctor as a user with +scan, such as `reader` in docker/acl.",
            )
        ]
    cancel = "Cancel each with `tidemill cancel ID` and submit it again; report how it came to be."
    return [
        ok("keys", census.extent),
        _judge("lost jobs", census.lost_jobs, Level.FAILURE, cancel),
        _judge(
            "unlisted queues",
            census.unlisted_queues,
            Level.FAILURE,
            "Submit one more job to each queue: that lists it again.",
        ),
        _judge(
            "stale leases",
            census.stale_leases,
            Level.WARNING,
            "None if a scheduler leads: it removes them when they run out.",
        ),
        _judge(
            "stale pointers",
            census.stale_pointers,
            Level.WARNING,
            "None if a scheduler leads: it drops them when their turn comes.",
        ),
        _judge(
            "stale times",
            census.stale_times,
            Level.WARNING,
            "None if a scheduler leads: it removes them when they have come.",
        ),
        _judge(
            "leaked keys",
            sorted(census.leaks),
            Level.WARNING,
            "Check with OBJECT IDLETIME that nobody uses them, then UNLINK them.",
        ),
    ]


def _judge(check: str, names: Sequence[str], level: Level, fix: str) -> Finding:
    if not names:
        return ok(check, "none")
    shown = ", ".join(names[:_NUM_EXAMPLES]) + (", ..." if len(names) > _NUM_EXAMPLES else "")
    return Finding(check, level, f"{len(names)}: {shown}", fix)
