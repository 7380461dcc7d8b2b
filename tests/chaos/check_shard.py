"""I3, I4, I6, I10: keys, leaks, writers, epochs and waits; and how the processes ended."""

from collections.abc import Iterator

from chaos.plan import MAX_CRASHES
from chaos.tokenlog import entries_of, tags_of
from chaos.truth import LASTING_COUNTERS, short
from chaos.verdict import SEAL, Entry, Run, Violation
from chaos.worker import UNAVAILABLE_STATUS, writer_tag
from tidemill.service.runtime import CRASH_STATUS

MAX_WAIT_SECONDS = 60.0
MAX_TRIAL_SECONDS = 180.0


def check_keys(run: Run) -> Iterator[Violation]:
    """I3: a key names one job, whoever uses it and however often."""
    for number, job_ids in run.accepted.items():
        if sum(not run.may_be_lost(job_id) for job_id in job_ids) > 1:
            yield Violation("I3", number, f"several jobs: {short(sorted(job_ids))}")
    # A key that was lost is free again.
    conflicts = [] if run.losses else run.of("conflict")
    for event in conflicts:
        if not event["refused"]:
            yield Violation("I3", event["n"], f"another body was accepted: {event['outcome']}")
    spare = len(run.truth.jobs.keys() - run.number_of().keys())
    unsure = [
        job.number
        for job in run.plan.jobs
        if not run.accepted.get(job.number) and (not job.key or job.rival is not None)
    ]
    if spare > len(unsure) and not run.losses:
        yield Violation("I3", None, f"{spare} jobs beside {len(unsure)} unconfirmed submissions")


def check_leaks(run: Run) -> Iterator[Violation]:
    """I4: nothing is left in counters and indexes, and every key will go one day."""
    left = {k: v for k, v in run.truth.counters.items() if k not in LASTING_COUNTERS}
    if left:
        yield Violation("I4", None, f"counters are left: {left}")
    for name, size in run.truth.indexes.items():
        if size:
            yield Violation("I4", None, f"{name} still has {size} entries")
    if int(run.truth.counters.get("rb", "0")) != run.truth.kept_bytes:
        kept = run.truth.kept_bytes
        yield Violation("I4", None, f"{run.truth.counters} counts {kept} kept bytes")
    if run.truth.leaked:
        yield Violation("I4", None, f"keys without a TTL: {short(run.truth.leaked)}")


def check_writers(run: Run) -> Iterator[Violation]:
    """I6 for workers: the claim before a chunk names its writer, in fence and in person."""
    numbers = run.number_of()
    for job_id in run.truth.logs:
        claim = Entry("0", 0)
        for entry in entries_of(run, job_id):
            number = numbers.get(job_id)
            if entry.claimant is not None:
                if int(entry.writer) <= int(claim.writer):
                    yield Violation("I6", number, f"claim {entry.writer} after {claim.writer}")
                claim = entry
            elif entry.ids and entry.writer not in (claim.writer, SEAL):
                yield Violation(
                    "I6", number, f"fence {entry.writer} writes under claim {claim.writer}"
                )
            tags = tags_of(entry.text)
            if tags - {writer_tag(claim.claimant or "")}:
                yield Violation("I6", number, f"{tags} wrote under the claim of {claim.claimant}")


def check_epochs(run: Run) -> Iterator[Violation]:
    """I6 for schedulers, by the broker's own clock: the run command's entry id."""
    if run.losses:
        return  # epochs and fences that were lost are given out again
    dispatches = sorted(run.of("dispatch"), key=lambda event: _command_ms(event["command"]))
    newest, since = 0, 0
    for event in dispatches:
        now = _command_ms(event["command"])
        if event["epoch"] > newest:
            newest, since = event["epoch"], now
        elif event["epoch"] < newest and now > since:
            yield Violation(
                "I6", None, f"epoch {event['epoch']} dispatched {event['job']} in epoch {newest}"
            )
    fences: dict[tuple[str, int], str] = {}
    for event in dispatches:
        first = fences.setdefault((event["job"], event["fence"]), event["worker"])
        if first != event["worker"]:
            yield Violation("I6", None, f"{event['job']} has fence {event['fence']} twice")


def check_waits(run: Run) -> Iterator[Violation]:
    """I10: no job starves."""
    for number, job_ids in run.accepted.items():
        for job_id in job_ids & run.truth.jobs.keys():
            stored = run.truth.jobs[job_id]
            if stored.get("tf", b"") != b"":
                seconds = (int(stored["tf"]) - int(stored["ts"])) / 1000
                bound = MAX_WAIT_SECONDS if int(stored["at"]) < MAX_CRASHES else MAX_TRIAL_SECONDS
                if seconds > bound:
                    yield Violation("I10", number, f"waited {seconds:.1f} s for its first token")


def check_processes(run: Run) -> Iterator[Violation]:
    """No process may end by itself, and each must leave in order when it is asked to."""
    for event in run.of("exit"):
        if event["status"] not in (0, -9, CRASH_STATUS, UNAVAILABLE_STATUS):
            yield Violation("I0", None, f"{event['name']} ended with status {event['status']}")
    for event in run.of("left"):
        if event["status"] != 0:
            yield Violation("I0", None, f"{event['name']} did not drain: {event['status']}")
    for event in run.of("stuck"):
        yield Violation("I1", None, f"the run did not come to rest: {event['why']}")


def _command_ms(command: str) -> int:
    return int(command.partition("-")[0])
