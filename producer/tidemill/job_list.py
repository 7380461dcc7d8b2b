"""A tenant's jobs, the newest first, in pages; does no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill._plan import Plan
from tidemill._reads import JobStatus, Read, job_status
from tidemill._terms import check_batch
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.ids import shard_of
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.states import JobState

MAX_PAGE = 100
DEFAULT_PAGE = 20

#: Jobs that are looked at in one round trip where not all are wanted.
_CHUNK = 250
#: Jobs that one page looks at, however few of them are wanted: what it takes is bounded.
MAX_LOOKED_AT = 2500

#: What else callers call the states.
_NAMES = {"running": JobState.RUNNING, **{state.value: state for state in JobState}}


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some of a tenant's jobs, the newest first.

    While ``has_more`` the next page is ``after`` the ``last_id``.  A page may have fewer jobs than
    asked for, even none, where few of many are wanted.
    """

    jobs: tuple[JobStatus, ...]
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class WantedJobs:
    """Which jobs of a tenant a page has: those in one of the states, or in any if there are none.

    ``batch`` is the name of the jobs' batch, empty for jobs of any and of none.
    """

    states: frozenset[JobState] = frozenset()
    batch: str = ""

    @classmethod
    def of(cls, state: str | Iterable[str] | None, batch: str | None) -> "WantedJobs":
        """Return what a caller wants; raises ``InvalidRequest``."""
        names = [state] if isinstance(state, str) else list(state or ())
        for name in names:
            if name not in _NAMES:
                raise InvalidRequest(
                    f"state: {str(name)[:40]!r} is not the state of a job",
                    field="state",
                    fix=f"Choose from {', '.join(JobState)}.",
                )
        states = frozenset(_NAMES[name] for name in names)
        return cls(states, "" if batch is None else check_batch(batch))

    @property
    def are_all(self) -> bool:
        """Whether every job is wanted."""
        return not self.states and not self.batch

    def include(self, state: bytes | None, batch: bytes | None) -> bool:
        """Whether a job with these fields is wanted; a job without a state is gone."""
        if state is None or (self.batch and (batch or b"") != self.batch.encode()):
            return False
        return not self.states or state.decode("utf-8", "replace") in self.states


def job_page(
    keys: ShardKeys, tenant: str, wanted: WantedJobs, *, after: str | None, limit: int
) -> Plan[JobPage]:
    """Read the next page behind the job ``after``, which may be gone; raises ``InvalidRequest``."""
    cursor = _checked_after(after)
    chunk = limit + 1 if wanted.are_all else _CHUNK
    found: list[str] = []
    num_seen = 0
    while num_seen < MAX_LOOKED_AT and len(found) <= limit:
        ids: list[str] = yield _ids_behind(keys.jobs(tenant), cursor, chunk)
        if not ids:
            return _page(found, (yield _statuses(keys, found)), None)
        states: list[Any] = yield _states(keys, ids)
        found += [
            job_id for job_id, fields in zip(ids, states, strict=True) if wanted.include(*fields)
        ]
        num_seen, cursor = num_seen + len(ids), ids[-1]
    if len(found) > limit:
        found = found[:limit]
        cursor = found[-1]
    return _page(found, (yield _statuses(keys, found)), cursor)


def checked_limit(limit: int) -> int:
    """Return how many jobs a page may have; raises ``InvalidRequest``."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit: it is not a number from 1 to {MAX_PAGE}", field="limit")
    return limit


def _checked_after(after: str | None) -> str:
    if after is None:
        return ""
    try:
        shard_of(after)
    except (InvalidRequest, TypeError) as error:
        raise InvalidRequest(
            f"after: {str(after)[:64]!r} is not a job id",
            field="after",
            fix="Use the id of the last job of a page.",
        ) from error
    return after


def _page(
    ids: Sequence[str], statuses: Sequence[JobStatus | None], more_behind: str | None
) -> JobPage:
    last = more_behind or (ids[-1] if ids else None)
    return JobPage(
        tuple(status for status in statuses if status is not None), last, more_behind is not None
    )


def _ids_behind(index: str, after: str, num: int) -> Read[list[str]]:
    newest = f"({after}" if after else "+"
    return Read(
        (("ZREVRANGEBYLEX", index, newest, "-", "LIMIT", 0, num),),
        lambda replies: [found.decode("utf-8", "replace") for found in replies[0]],
    )


def _states(keys: ShardKeys, ids: Sequence[str]) -> Read[list[Any]]:
    return Read(tuple(("HMGET", keys.job(job_id), "st", "bid") for job_id in ids), list)


def _statuses(keys: ShardKeys, ids: Sequence[str]) -> Read[list[JobStatus | None]]:
    reads = [job_status(keys, job_id) for job_id in ids]
    width = len(reads[0].commands) if reads else 0

    def parse(replies: list[Any]) -> list[JobStatus | None]:
        return [
            read.parse(replies[index * width : (index + 1) * width])
            for index, read in enumerate(reads)
        ]

    return Read(tuple(command for read in reads for command in read.commands), parse)
