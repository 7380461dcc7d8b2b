"""I1: every accepted job ends once, in a way that it may end, and not before its time."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from chaos.plan import FLAKY, HOPELESS, MAX_CRASHES, POISON, UNFIT, JobPlan
from chaos.tokenlog import entries_of, state_of
from chaos.verdict import SEAL, TERMINAL, Run, Violation


def check_ends(run: Run) -> Iterator[Violation]:
    """Each accepted job is there and has one terminal state, the last word of its log."""
    for number, job_ids in run.accepted.items():
        for job_id in job_ids:
            stored = run.truth.jobs.get(job_id)
            if stored is None:
                if not run.may_be_lost(job_id):
                    yield Violation("I1", number, f"{job_id} was accepted and is lost")
                continue
            for what in _end_faults(run, run.by_number[number], job_id, stored):
                yield Violation("I1", number, what)
    numbers = run.number_of()
    for job_id, stored in run.truth.jobs.items():
        if job_id not in numbers and state_of(stored) not in TERMINAL:
            yield Violation("I1", None, f"{job_id}, never confirmed, is {state_of(stored)}")


def _end_faults(run: Run, job: JobPlan, job_id: str, stored: dict[str, bytes]) -> Iterator[str]:
    state, log = state_of(stored), entries_of(run, job_id)
    if state not in TERMINAL:
        yield f"{job_id} is {state} at the end"
        return
    ends = [entry for entry in log if entry.end is not None]
    if len(ends) != 1 or ends[0].end is None or ends[0].writer != SEAL:
        yield f"{len(ends)} terminal entries, sealed or not"
        return
    if log[-1] != ends[0]:
        yield "the log goes on after its end"
    if ends[0].end["state"] != state:
        yield f"{state}, but its log says {ends[0].end['state']}"
    if not _may_end_as(run, job, stored, ends[0].end):
        yield f"it may not end as {state}: {ends[0].end.get('error')}"


def _may_end_as(run: Run, job: JobPlan, stored: dict[str, bytes], end: dict[str, Any]) -> bool:
    match state_of(stored):
        case "done":
            return not any(map(job.has, (POISON, HOPELESS, UNFIT)))
        case "cancelled":
            swept = {event["sweep"] for event in run.of("sweep")}
            return job.number in run.cancels or any(
                sweep.number in swept and sweep.covers(job) for sweep in run.plan.sweeps
            )
        case "failed":
            return job.has(UNFIT)
        case "dead":
            return _may_die(job, stored)
        case "expired":
            return _may_expire(job, stored, str(end.get("finish_reason")))
    return False


def _may_die(job: JobPlan, stored: dict[str, bytes]) -> bool:
    is_tried_out = int(stored.get("rt", b"0")) >= int(stored["mx"])
    if is_tried_out and (job.has(FLAKY) or job.has(HOPELESS)):
        return True
    # An innocent one that so many workers died with shares their fate, as documented.
    return int(stored.get("cr", b"0")) >= MAX_CRASHES


def _may_expire(job: JobPlan, stored: dict[str, bytes], reason: str) -> bool:
    ended = int(stored["te"])
    match reason:
        case "deadline":
            # A retry that would come too late ends a job before its deadline.
            return bool(job.deadline) and (ended >= int(stored["dl"]) or "err" in stored)
        case "queue_timeout":
            return bool(job.max_queue) and ended >= int(stored["qdl"])
        case "stalled":
            moved = max(int(stored["td"]), int(stored.get("tp", b"0")))
            return bool(job.stall) and ended >= moved + int(stored["sm"])
    return False


def check_times(run: Run) -> Iterator[Violation]:
    """No worker gets a job before its delay is over, or first gets it after ``max_queue``."""
    for number, job_ids in run.accepted.items():
        job = run.by_number[number]
        for job_id in job_ids & run.truth.jobs.keys():
            stored = run.truth.jobs[job_id]
            if "td" not in stored:
                continue
            submitted, dispatched = int(stored["ts"]), int(stored["td"])
            if dispatched < submitted + int(1000 * job.delay):
                yield Violation("I1", number, "ran before its delay was over")
            limit = int(stored.get("qdl", b"0"))
            if int(stored["at"]) == 1 and 0 < limit < dispatched:
                yield Violation("I1", number, "first ran after its time in the queue was over")


def check_batches(run: Run) -> Iterator[Violation]:
    """The figures of a batch are those of its jobs, and none of them is still a member."""
    ended: dict[str, Counter[str]] = {}
    for stored in run.truth.jobs.values():
        if batch := stored.get("bid", b"").decode():
            name = f"{stored['tn'].decode()}:{batch}"
            ended.setdefault(name, Counter())[state_of(stored)] += 1
    for name, figures in run.truth.batches.items():
        found = {state: n for state, n in figures.items() if n and state != "total"}
        wanted = ended.pop(name, Counter())
        if found != dict(wanted) or figures.get("total", 0) != wanted.total():
            yield Violation("I1", None, f"batch {name} says {figures} for {dict(wanted)}")
    for name, counts in ended.items():
        yield Violation("I1", None, f"batch {name} of {counts.total()} jobs is gone")


def check_refusals(run: Run) -> Iterator[Violation]:
    """A job is refused for good only if its batch was closed."""
    for event in run.of("closed"):
        job = run.by_number[event["n"]]
        if not any(sweep.batch and sweep.covers(job) for sweep in run.plan.sweeps):
            yield Violation("I1", job.number, f"refused: {event.get('error')}")


def check_letters(run: Run) -> Iterator[Violation]:
    """Each dead job has one dead letter, and nobody else has one."""
    numbers = run.number_of()
    letters = Counter(letter["j"] for letter in run.truth.dead_letters)
    for job_id, stored in run.truth.jobs.items():
        wanted = int(state_of(stored) == "dead")
        if letters.pop(job_id, 0) != wanted:
            yield Violation("I1", numbers.get(job_id), f"{state_of(stored)}, not {wanted} letters")
    # An entry of the front door that is refused becomes a letter that names no job.
    if any(run.by_number[event["n"]].is_raw for event in run.of("closed")):
        letters.pop("", None)
    if letters:
        yield Violation("I1", None, f"dead letters of unknown jobs: {dict(letters)}")


def check_back_doors(run: Run) -> Iterator[Violation]:
    """Each ended job is told at its tenant's back door, once and as it ended."""
    numbers = run.number_of()
    wanted = {
        (job_id, stored.get("tn", b"").decode(), state_of(stored))
        for job_id, stored in run.truth.jobs.items()
    }
    told = Counter((entry["j"], tenant, entry["s"]) for tenant, entry in run.truth.back_doors)
    for ending in wanted | told.keys():
        if told[ending] != int(ending in wanted):
            what = f"{ending} was told {told[ending]} times at the back door"
            yield Violation("I1", numbers.get(ending[0]), what)
