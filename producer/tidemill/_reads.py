"""What the SDK reads from Redis, as values: commands and how to understand their replies."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.codec import MAX_RESULT_BYTES, decode
from tidemill.protocol.errors import MalformedMessage, ProtocolError
from tidemill.protocol.functions import Field
from tidemill.protocol.keys import ShardKeys, keys_of
from tidemill.protocol.messages import JobEnd, JobResult, ModelCard, WorkerInfo
from tidemill.protocol.states import JobState
from tidemill.protocol.stored import is_text, require_number, require_text, shown

R = TypeVar("R", covariant=True)

#: Token-log entries in one reply.
PAGE_SIZE = 512

#: Major part of the entry id that ends a token log; the minor part is the number of tokens.
SEAL = "9007199254740991"


@dataclass(frozen=True, slots=True)
class Read(Generic[R]):
    """Commands that change nothing, sent in one round trip."""

    commands: tuple[tuple[Field, ...], ...]
    parse: Callable[[list[Any]], R]


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Add the job's id, a key or a field to what is raised about unreadable bytes of it."""
    try:
        yield
    except ProtocolError as error:
        raise type(error)(f"{place}: {error.message}", fix=error.fix) from error


class LogEntry(NamedTuple):
    """One entry of a token log with its raw fields."""

    entry_id: str
    fields: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class LogPage:
    """A part of a token log, and the job's state as it was *before* the log was read.

    So a job that is terminal here and whose log has no end in sight has lost its log to its TTL.
    ``state`` is None if there is no such job.
    """

    state: JobState | None
    entries: tuple[LogEntry, ...]

    @property
    def is_last(self) -> bool:
        """Whether nothing followed when it was read."""
        return len(self.entries) < PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job's state and, if its worker finished it, the stored result."""

    state: JobState | None
    result: JobResult | None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a job is queued or runs; what ``cancel`` needs to name its keys."""

    ref: JobRef
    worker_id: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of one job; times are in ms of the server's clock, None if not reached or set.

    ``ready_ms`` is when a delayed job may run, ``deadline_ms`` when it expires.  ``num_retries`` of
    ``max_retries`` were used up.  ``error`` is that of the last try, or why the job ended, the
    latter like ``finish_reason`` for as long as its token log is kept.  ``parent`` is the dead job
    that this one repeats, ``metadata`` what its owner wanted to be kept.
    """

    job_id: str
    state: JobState
    model: str
    priority: int
    num_tokens: int
    attempts: int
    submitted_ms: int
    dispatched_ms: int | None
    first_token_ms: int | None
    ended_ms: int | None
    ready_ms: int | None = None
    deadline_ms: int | None = None
    num_retries: int = 0
    max_retries: int = 0
    finish_reason: str | None = None
    error: str | None = None
    batch: str | None = None
    parent: str | None = None
    tenant: str = "default"
    metadata: dict[str, str] = field(default_factory=dict)


def log_page(keys: ShardKeys, job_id: str, after: str) -> Read[LogPage]:
    """Read the log entries that follow the entry id ``after``; all from the first if empty."""
    start = f"({after}" if after else "-"
    return Read(
        (
            ("HGET", keys.job(job_id), "st"),
            ("XRANGE", keys.token_log(job_id), start, "+", "COUNT", PAGE_SIZE),
        ),
        lambda replies: LogPage(
            _state(replies[0]),
            tuple(LogEntry(entry_id.decode(), fields) for entry_id, fields in replies[1]),
        ),
    )


def outcome(keys: ShardKeys, job_id: str) -> Read[Outcome]:
    """Read how a job ended, if it did."""
    return Read((("HMGET", keys.job(job_id), "st", "res"),), lambda replies: _outcome(*replies[0]))


def location(keys: ShardKeys, job_id: str) -> Read[Location | None]:
    """Read where a job is; None if there is no such job."""
    return Read(
        (("HMGET", keys.job(job_id), "w", *REF_FIELDS),),
        lambda replies: _location(job_id, *replies[0]),
    )


_STATUS_FIELDS = (
    *("st", "md", "pr", "n", "at", "ts", "td", "tf", "te"),
    *("dl", "rt", "mx", "err", "bid", "par", "tn", "meta"),
)


def job_status(keys: ShardKeys, job_id: str) -> Read[JobStatus | None]:
    """Read a snapshot of one job; None if there is no such job.

    Raises ``MalformedMessage``, naming key and field, if a part of it cannot be read.
    """
    return Read(
        (
            ("HMGET", keys.job(job_id), *_STATUS_FIELDS),
            ("ZSCORE", keys.delayed, job_id),
            ("XREVRANGE", keys.token_log(job_id), "+", "-", "COUNT", 1),
        ),
        lambda replies: _named_status(keys, job_id, replies),
    )


def model_card(keys: ShardKeys, name: str) -> Read[ModelCard | None]:
    """Read the card of one model; None if no worker served it lately."""
    return Read(
        (("HGET", keys.model(name), "card"),),
        lambda replies: replies[0] and decode(replies[0], ModelCard),
    )


def model_names(keys: ShardKeys) -> Read[tuple[str, ...]]:
    """Read the names of the models whose cards have not expired, sorted."""
    return Read(
        (("TIME",), ("ZRANGE", keys.models, 0, -1, "WITHSCORES")),
        lambda replies: unexpired(now_ms(replies[0]), replies[1]),
    )


def live_workers(keys: ShardKeys) -> Read[tuple[str, ...]]:
    """Read the ids of the workers whose heartbeat has not run out, sorted."""
    return Read(
        (("TIME",), ("ZRANGE", keys.workers, 0, -1, "WITHSCORES")),
        lambda replies: unexpired(now_ms(replies[0]), replies[1]),
    )


def models_of(keys: ShardKeys, worker_ids: Sequence[str]) -> Read[tuple[str, ...]]:
    """Read the names of the models that these workers serve, sorted."""
    return Read(
        tuple(("HGET", keys.worker_info(worker_id), "info") for worker_id in worker_ids),
        lambda replies: tuple(sorted({decode(raw, WorkerInfo).model for raw in replies if raw})),
    )


def now_ms(reply: Sequence[int]) -> int:
    """Turn the reply to ``TIME`` into ms."""
    seconds, microseconds = reply
    return int(seconds) * 1000 + int(microseconds) // 1000


def unexpired(now: int, members: Sequence[bytes]) -> tuple[str, ...]:
    """Keep the members of a flat (member, expiry in ms) reply that have not expired, sorted.

    Those that are no text are left out: no worker and no model has such a name.
    """
    pairs = zip(members[::2], members[1::2], strict=True)
    return tuple(
        sorted(name.decode() for name, expiry in pairs if float(expiry) > now and is_text(name))
    )


def _state(value: bytes | None) -> JobState | None:
    try:
        return None if value is None else JobState(value.decode())
    except ValueError as error:
        raise MalformedMessage(f"st: {value!r} is not the state of a job") from error


def _location(
    job_id: str, worker: bytes | None, queue: bytes | None, *others: bytes | None
) -> Location | None:
    if queue is None:
        return None
    return located(job_id, worker, (queue, *others))


def located(job_id: str, worker: bytes | None, reference: Sequence[bytes | None]) -> Location:
    """Return where a job is from ``w`` and ``REF_FIELDS``; raises ``MalformedMessage``."""
    with naming(keys_of(job_id).job(job_id)):
        # A name that is read as another one would be looked for without end.
        return Location(JobRef.read(job_id, reference), require_text("w", worker))


def _outcome(state: bytes | None, stored: bytes | None) -> Outcome:
    known = _state(state)
    if stored is None:
        return Outcome(known, None)
    with naming("res"):
        return Outcome(known, decode(stored, JobResult, max_bytes=MAX_RESULT_BYTES))


def _named_status(keys: ShardKeys, job_id: str, replies: list[Any]) -> JobStatus | None:
    with naming(keys.job(job_id)):
        return _job_status(job_id, *replies)


def _job_status(
    job_id: str,
    values: Sequence[bytes | None],
    ready: float | None,
    last_entries: Sequence[tuple[bytes, dict[bytes, bytes]]],
) -> JobStatus | None:
    fields = dict(zip(_STATUS_FIELDS, values, strict=True))

    def number(field: str) -> int:
        return require_number(field, fields[field])

    def optional_number(field: str) -> int | None:
        return None if fields[field] is None else number(field)

    state = _state(fields["st"])
    if state is None:
        return None
    ending = last_entries[0][1].get(b"e") if last_entries else None
    with naming("the end of its log"):
        end = None if ending is None else decode(ending, JobEnd)
    return JobStatus(
        job_id=job_id,
        state=state,
        model=require_text("md", fields["md"]),
        priority=number("pr"),
        num_tokens=number("n"),
        attempts=number("at"),
        submitted_ms=number("ts"),
        dispatched_ms=optional_number("td"),
        first_token_ms=optional_number("tf"),
        ended_ms=optional_number("te"),
        ready_ms=None if ready is None else int(ready),
        deadline_ms=number("dl") or None,
        num_retries=number("rt"),
        max_retries=number("mx"),
        finish_reason=None if end is None else end.finish_reason,
        error=(end and end.error) or _optional_text(fields["err"]),
        batch=_optional_text(fields["bid"]),
        parent=_optional_text(fields["par"]),
        tenant=require_text("tn", fields["tn"]),
        metadata=read_metadata(fields["meta"]),
    )


def read_metadata(stored: bytes | None) -> dict[str, str]:
    """Return a job's metadata from its hash; raises ``MalformedMessage``."""
    try:
        pairs = json.loads(stored or b"{}")
        return {str(name): str(value) for name, value in pairs.items()}
    except (ValueError, AttributeError) as error:
        raise MalformedMessage(f"meta: {shown(stored or b'')} is no object of JSON") from error


def _optional_text(value: bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if value else None
