"""What a client keeps of a job it submitted, and when that lets it submit the job again; pure.

A server that restarts or is replaced may have lost the last of what it acknowledged.  Whoever holds
the receipt of a job that is missing afterwards submits the very same job again, under its id,
which determines its seed if it has none of its own, so that it generates the same tokens.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from tidemill._patience import TRY_SHARE
from tidemill._reads import Read
from tidemill.protocol import calls
from tidemill.protocol.calls import NewJob, Submitted, is_at_risk
from tidemill.protocol.errors import BatchClosed, ConfigError, ResultExpired, TidemillError
from tidemill.protocol.functions import Call, Field, R
from tidemill.protocol.keys import ShardKeys
from tidemill.result import result_expired

#: Level of a job that at least one replica has, whatever the servers do about their disks.
REPLICA = "replica"

#: Level of a job whose server nobody has looked at yet.
UNKNOWN = "unknown"

#: How long an acknowledgement of a replica is waited for.
_REPLICA_WAIT_MS = 500


@dataclass(frozen=True, slots=True)
class ServerId:
    """Which server process accepted a job, and in which history of its data; "" if unknown."""

    run_id: str
    replication_id: str


@dataclass(frozen=True, slots=True)
class ServerNow:
    """Which server answers now, and whether it was a replica before."""

    id: ServerId
    was_promoted: bool


@dataclass(slots=True, eq=False, weakref_slot=True)
class Fate:
    """``has_ended`` is set once a client was told how the job ended, or has cancelled it."""

    batch: str
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Receipt:
    """A job as it was accepted by a server.

    ``wait_ms`` is how long it was likely to wait for a worker, None if nobody knew.
    """

    job: NewJob
    created: bool
    durability: str
    server: ServerId
    fate: Fate
    wait_ms: int | None = None

    @property
    def job_id(self) -> str:
        """The id under which the job was accepted."""
        return self.job.job_id

    @property
    def deadline_at_risk(self) -> bool:
        """Whether the job is likely to wait beyond its deadline."""
        return is_at_risk(self.job.terms, self.wait_ms)


def estimated_wait(receipt: Receipt | None) -> float | None:
    """Return the wait that a receipt tells of in seconds, None if there is none."""
    return None if receipt is None or receipt.wait_ms is None else receipt.wait_ms / 1000


class PlainCommand(Call[R]):
    """A command that goes along with function calls; its arguments are the whole of it."""

    @property
    def command(self) -> tuple[Field, ...]:
        """The command."""
        return self.args


def check_durability(level: str | None) -> bool:
    """Return whether ``level`` asks for a replica; raises ``ConfigError`` for what is no level."""
    if level not in (None, REPLICA):
        raise ConfigError(
            f"durability is {level!r}, but must be None or {REPLICA!r}",
            fix="The levels fsync and fast are settings of the server, see docs/operations.md.",
        )
    return level is not None


def submit_calls(
    keys: ShardKeys, jobs: Sequence[NewJob], *, wait_ms: int | None
) -> list[Call[Any]]:
    """Return what submits ``jobs`` and tells where; ``wait_ms`` bounds the wait for a replica."""
    which = PlainCommand("", (), ("INFO", "replication"), _history)
    wait = PlainCommand("", (), ("WAIT", 1, wait_ms or 0), int)
    submits = [calls.submit(keys, job) for job in jobs]
    return [*submits, which, *([] if wait_ms is None else [wait])]


def replica_wait_ms(timeout: float) -> int:
    """Return how long to wait for a replica if a call may take ``timeout`` seconds: half a try."""
    return max(1, min(_REPLICA_WAIT_MS, int(timeout * TRY_SHARE * 500)))


def receipts(jobs: Sequence[NewJob], replies: Sequence[Any]) -> list[Receipt | TidemillError]:
    """Read the replies to ``submit_calls``."""
    replication_id, *acknowledged = replies[len(jobs) :]
    return [
        _receipt(job, reply, replication_id, bool(sum(acknowledged)))
        if isinstance(reply, Submitted)
        else reply
        for job, reply in zip(jobs, replies[: len(jobs)], strict=True)
    ]


class Fates:
    """What is known of the jobs whose handles somebody still holds; safe to share between threads.

    All receipts of one job share its fate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fates: WeakValueDictionary[str, Fate] = WeakValueDictionary()

    def add(self, outcomes: Sequence[Receipt | TidemillError]) -> None:
        """Remember what a submission has brought."""
        with self._lock:
            for receipt in outcomes:
                if isinstance(receipt, Receipt):
                    receipt.fate = self._fates.setdefault(receipt.job_id, receipt.fate)

    def cancel(self, job_id: str) -> None:
        """Note that the job is cancelled, so that nothing brings it back."""
        with self._lock:
            if (fate := self._fates.get(job_id)) is not None:
                fate.has_ended = True

    def cancel_all(self, *, batch: str | None = None) -> None:
        """Note that all jobs of ``batch``, or all that there are, are cancelled."""
        with self._lock:
            for fate in self._fates.values():
                if batch in (None, fate.batch):
                    fate.has_ended = True


@dataclass(frozen=True, slots=True)
class Survey:
    """Which server answers now, which of the jobs in question it has, and who had accepted them.

    The latter as it was before the look: another reader may renew a receipt at any time.
    """

    server: ServerNow
    is_there: list[bool]
    accepted: list[ServerId]


def survey(keys: ShardKeys, receipts: Sequence[Receipt]) -> Read[Survey]:
    """Look for the jobs of ``receipts`` in one round trip."""
    accepted = [receipt.server for receipt in receipts]
    looks = (("EXISTS", keys.job(receipt.job_id)) for receipt in receipts)
    return Read(
        (("INFO", "server"), ("INFO", "replication"), *looks),
        lambda replies: Survey(_server(*replies[:2]), [bool(r) for r in replies[2:]], accepted),
    )


def triage(
    lost: Sequence[Receipt], found: Survey
) -> tuple[list[TidemillError | None], list[Receipt]]:
    """Return for each job what speaks against submitting it again, and those to be submitted.

    A job that is there has been brought back by another reader meanwhile.
    """
    problems = [
        None if is_there else _reason_not_to(receipt, accepted, found.server)
        for receipt, is_there, accepted in zip(lost, found.is_there, found.accepted, strict=True)
    ]
    cases = zip(lost, problems, found.is_there, strict=True)
    return problems, [receipt for receipt, no, there in cases if no is None and not there]


def renew_all(
    chosen: Sequence[Receipt], accepted: Sequence[Receipt | TidemillError]
) -> dict[str, TidemillError | None]:
    """Renew the receipts of jobs that were submitted again; returns what went wrong, by job id."""
    pairs = zip(chosen, accepted, strict=True)
    return {receipt.job_id: _renew(receipt, again) for receipt, again in pairs}


def valid_jobs(made: Sequence[NewJob | TidemillError]) -> list[NewJob]:
    """Return those that could be made."""
    return [job for job in made if isinstance(job, NewJob)]


def fill_in(
    made: Sequence[NewJob | TidemillError], accepted: Sequence[Receipt | TidemillError]
) -> list[Receipt | TidemillError]:
    """Put the outcome of each valid job into its place."""
    outcomes: Iterator[Receipt | TidemillError] = iter(accepted)
    return [next(outcomes) if isinstance(job, NewJob) else job for job in made]


def _reason_not_to(receipt: Receipt, accepted: ServerId, server: ServerNow) -> TidemillError | None:
    if receipt.fate.has_ended or not _is_another(accepted, server):
        return result_expired(receipt.job_id)
    return None


def _renew(receipt: Receipt, again: Receipt | TidemillError) -> TidemillError | None:
    if isinstance(again, BatchClosed):
        # It was cancelled with its batch.
        receipt.fate.has_ended = True
        return result_expired(receipt.job_id)
    if isinstance(again, TidemillError):
        return again
    if again.job_id != receipt.job_id:
        return ResultExpired(
            f"the server has lost {receipt.job_id}, and its idempotency key has made"
            f" {again.job_id} meanwhile",
            job_id=receipt.job_id,
            fix="Read that job instead.",
        )
    receipt.server, receipt.durability = again.server, again.durability
    return None


def _receipt(job: NewJob, reply: Submitted, replication_id: str, replicated: bool) -> Receipt:
    return Receipt(
        job=job if reply.job_id == job.job_id else replace(job, job_id=reply.job_id),
        created=reply.created,
        durability=REPLICA if replicated else reply.durability or UNKNOWN,
        server=ServerId(reply.run_id, replication_id),
        fate=Fate(job.terms.batch),
        wait_ms=reply.wait_ms,
    )


def _server(server: dict[str, Any], replication: dict[str, Any]) -> ServerNow:
    return ServerNow(
        id=ServerId(str(server.get("run_id", "")), _history(replication)),
        # The history before a promotion; all zeros, or absent, if there was none.
        was_promoted=bool(str(replication.get("master_replid2", "")).strip("0")),
    )


def _history(replication: dict[str, Any]) -> str:
    return str(replication.get("master_replid", ""))


def _is_another(accepted: ServerId, now: ServerNow) -> bool:
    if not (accepted.replication_id and now.id.replication_id):
        # A managed server may hide it.
        return bool(accepted.run_id and now.id.run_id) and accepted.run_id != now.id.run_id
    if accepted.replication_id == now.id.replication_id:
        return False
    # A master whose last replica left an hour ago renames its history and loses nothing.
    return accepted.run_id != now.id.run_id or now.was_promoted
