"""Each promise, broken in one place of a record made by hand, is noticed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos.checker import check
from chaos.forgery import (
    CANCELLED_JOB,
    JOB,
    OLD_WORKER,
    POISON_JOB,
    TOKENS,
    WORKER,
    Forgery,
    chunk,
    claim,
    message,
)
from chaos.plan import Sweep
from chaos.tokenlog import unpack
from chaos.verdict import SEAL

Spoil = Callable[[Forgery], object]


def broken(spoil: Spoil) -> set[str]:
    """The invariants that are broken once ``spoil`` has changed a flawless run."""
    forgery = Forgery()
    spoil(forgery)
    return {violation.invariant for violation in check(forgery.run())}


def change_plan(forgery: Forgery, number: int, **fields: object) -> None:
    jobs = list(forgery.plan.jobs)
    jobs[number] = replace(jobs[number], **fields)  # type: ignore[arg-type]
    forgery.plan = replace(forgery.plan, jobs=tuple(jobs))


def change_result(forgery: Forgery, **fields: object) -> None:
    forgery.job["res"] = message({**unpack(forgery.job["res"]), **fields})


def end_as(forgery: Forgery, job_id: str, state: str, reason: str = "error") -> None:
    forgery.truth.jobs[job_id]["st"] = state.encode()
    entry_id, fields = forgery.truth.logs[job_id][-1]
    end = message({"state": state, "finish_reason": reason})
    forgery.truth.logs[job_id][-1] = (entry_id, {**fields, "e": end})


def expire(forgery: Forgery, reason: str, **fields: bytes) -> None:
    end_as(forgery, CANCELLED_JOB, "expired", reason)
    forgery.truth.jobs[CANCELLED_JOB].update(fields)
    forgery.tell_again()


def test_a_flawless_run_is_found_flawless() -> None:
    assert not broken(lambda forgery: None)


ENDS: dict[str, Spoil] = {
    "an accepted job is lost": lambda f: (
        f.truth.jobs.pop(CANCELLED_JOB),
        f.truth.logs.pop(CANCELLED_JOB),
    ),
    "a job is still running": lambda f: f.truth.jobs[CANCELLED_JOB].update(st=b"run"),
    "a job nobody knows of has not ended": lambda f: f.truth.jobs.update(x={"st": b"queued"}),
    "a job has two ends": lambda f: f.truth.logs[CANCELLED_JOB].append(
        (f"{SEAL}-1", f.truth.logs[CANCELLED_JOB][-1][1])
    ),
    "a job has no end": lambda f: f.truth.logs[CANCELLED_JOB].clear(),
    "an end is not sealed": lambda f: f.truth.logs[CANCELLED_JOB].__setitem__(
        0, ("2-0", f.truth.logs[CANCELLED_JOB][0][1])
    ),
    "the log contradicts the state": lambda f: f.truth.jobs[CANCELLED_JOB].update(st=b"done"),
    "a log goes on after its end": lambda f: f.log.append(claim(9, 4, WORKER)),
    "a job was cancelled unasked": lambda f: f.events.__delitem__(slice(3, 5)),
    "a healthy job failed": lambda f: end_as(f, CANCELLED_JOB, "failed"),
    "a healthy job died": lambda f: end_as(f, CANCELLED_JOB, "dead"),
    "a job expired without a limit": lambda f: expire(f, "deadline", dl=b"8000"),
    "a job expired too early": lambda f: (
        change_plan(f, 1, deadline=9.0),
        expire(f, "deadline", dl=b"9500"),
    ),
    "a job left the queue too early": lambda f: (
        change_plan(f, 1, max_queue=9.0),
        expire(f, "queue_timeout", qdl=b"9500"),
    ),
    "a job was called stalled too early": lambda f: (
        change_plan(f, 1, stall=3.0),
        expire(f, "stalled", td=b"2000", tp=b"8000", sm=b"3000"),
    ),
    "a job ran before its delay was over": lambda f: change_plan(f, 0, delay=1.5),
    "a job first ran too late": lambda f: f.job.update(at=b"1", qdl=b"1900"),
    "a batch counts wrong": lambda f: f.truth.batches["default:b0"].update(done=2),
    "a batch is gone": lambda f: f.truth.batches.clear(),
    "a dead job has no letter": lambda f: f.truth.dead_letters.clear(),
    "a dead job has two letters": lambda f: f.truth.dead_letters.append({"j": POISON_JOB}),
    "there is a letter of no job": lambda f: f.truth.dead_letters.append({"j": ""}),
    "the back door does not tell a job": lambda f: f.truth.back_doors.pop(),
    "the back door tells a job twice": lambda f: f.truth.back_doors.append(f.truth.back_doors[0]),
    "the back door tells another end": lambda f: f.truth.back_doors[0][1].update(s="dead"),
    "the back door is another tenant's": lambda f: f.truth.back_doors.__setitem__(
        0, ("blue", f.truth.back_doors[0][1])
    ),
    "a job was refused though its batch is open": lambda f: f.events.append(
        {"e": "closed", "t": 50.0, "n": 0}
    ),
    "a run never came to rest": lambda f: f.events.append({"e": "stuck", "t": 99.0, "why": "?"}),
}


@pytest.mark.parametrize("case", ENDS)
def test_it_is_noticed_if(case: str) -> None:
    assert "I1" in broken(ENDS[case])


@pytest.mark.parametrize(
    ("reason", "limit", "fields"),
    [
        ("deadline", {"deadline": 5.0}, {"dl": b"6000"}),
        ("queue_timeout", {"max_queue": 5.0}, {"qdl": b"6000"}),
        ("stalled", {"stall": 2.0}, {"td": b"2000", "tp": b"6000", "sm": b"2000"}),
    ],
)
def test_a_job_may_expire_when_its_time_is_over(
    reason: str, limit: dict[str, float], fields: dict[str, bytes]
) -> None:
    def spoil(forgery: Forgery) -> None:
        change_plan(forgery, 1, **limit)
        expire(forgery, reason, **fields)

    assert not broken(spoil)


def drop_token(forgery: Forgery) -> None:
    forgery.log[3] = chunk(2, 3, 3, WORKER)


def repeat_chunk(forgery: Forgery) -> None:
    forgery.log.insert(2, forgery.log[1])


def invent_token(forgery: Forgery) -> None:
    entry_id, fields = forgery.log[3]
    data = unpack(fields["d"]) | {"ids": [TOKENS[2] + 1]}
    forgery.log[3] = (entry_id, {**fields, "d": message(data)})


def end_early(forgery: Forgery) -> None:
    forgery.log[-1] = (f"{SEAL}-3", {"s": b"3", "e": forgery.log[-1][1]["e"]})
    forgery.job["n"] = b"3"


TOKEN_FAULTS: dict[str, Spoil] = {
    "the log lacks a token": drop_token,
    "the log repeats a chunk": repeat_chunk,
    "a token is wrong": invent_token,
    "a finished job lacks its last token": end_early,
    "the job counts wrong": lambda f: f.job.update(n=b"5"),
    "an entry id counts wrong": lambda f: f.log.__setitem__(1, ("1-3", f.log[1][1])),
    "the result is gone": lambda f: f.job.pop("res"),
    "the result has other tokens": lambda f: change_result(f, ids=TOKENS[:3]),
    "the result has another text": lambda f: change_result(f, text="?"),
    "a subscriber missed a chunk": lambda f: f.events.remove(f.event("chunk")),
    "a subscriber got a chunk twice": lambda f: f.events.insert(8, f.event("chunk")),
    "a subscriber had to begin anew": lambda f: f.events.insert(
        0, {"e": "reread", "t": 0.0, "n": f.event("chunk")["n"]}
    ),
    "a subscriber got another token": lambda f: f.event("chunk").update(ids=[1, 2]),
    "a subscriber got another text": lambda f: f.event("chunk").update(text="?"),
    "a subscriber saw no end": lambda f: f.events.remove(f.event("followed")),
    "a subscriber saw the wrong end": lambda f: f.event("followed").update(state="dead"),
    "a subscriber saw two ends": lambda f: f.events.append(
        {**f.event("followed"), "state": "dead"}
    ),
}


@pytest.mark.parametrize("case", TOKEN_FAULTS)
def test_tokens_are_told_wrong_if(case: str) -> None:
    assert "I2" in broken(TOKEN_FAULTS[case])


KEY_FAULTS: dict[str, Spoil] = {
    "a key names two jobs": lambda f: (
        f.truth.jobs.update(job_d=f.truth.jobs[CANCELLED_JOB]),
        f.truth.logs.update(job_d=f.truth.logs[CANCELLED_JOB]),
        f.events.append({"e": "accepted", "t": 50.0, "n": 1, "job": "job_d"}),
    ),
    "another body was accepted": lambda f: f.event("conflict").update(refused=False),
    "there are jobs nobody submitted": lambda f: f.truth.jobs.update(x={"st": b"done"}),
}


@pytest.mark.parametrize("case", KEY_FAULTS)
def test_keys_are_broken_if(case: str) -> None:
    assert "I3" in broken(KEY_FAULTS[case])


LEAKS: dict[str, Spoil] = {
    "a counter is left": lambda f: f.truth.counters.update({"q:default": "1"}),
    "a lease is left": lambda f: f.truth.indexes.update(run=1),
    "a delayed job is left": lambda f: f.truth.indexes.update(dly=1),
    "a queue is left": lambda f: f.truth.indexes.update({"in": 1}),
    "a key lives for ever": lambda f: f.truth.leaked.append("tm:{00}:o:job_a"),
    "kept bytes are counted wrong": lambda f: f.truth.counters.update(rb="78"),
}


@pytest.mark.parametrize("case", LEAKS)
def test_a_leak_is_noticed_if(case: str) -> None:
    assert broken(LEAKS[case]) == {"I4"}


WRITERS: dict[str, Spoil] = {
    "a stale fence writes": lambda f: f.log.__setitem__(3, chunk(1, 2, 3, WORKER)),
    "a stale worker writes under a new fence": lambda f: f.log.__setitem__(
        3, chunk(2, 2, 3, OLD_WORKER)
    ),
    "a stale worker writes the last tokens": lambda f: f.log.__setitem__(
        4, chunk(SEAL, 3, 4, OLD_WORKER, state="done")
    ),
    "a claim goes back": lambda f: f.log.__setitem__(2, claim(1, 2, WORKER)),
    "a chunk comes before any claim": lambda f: f.log.__delitem__(0),
    "an old epoch dispatches": lambda f: f.event("dispatch").update(epoch=0),
    "two workers have one fence": lambda f: f.event("dispatch").update(fence=1),
}


@pytest.mark.parametrize("case", WRITERS)
def test_a_stale_writer_is_noticed_if(case: str) -> None:
    assert "I6" in broken(WRITERS[case])


def test_usage_that_is_not_that_of_the_tokens_is_noticed() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 3}
    end = {"state": "done", "usage": usage}
    assert broken(lambda forgery: change_result(forgery, end=end)) == {"I7"}


def test_a_job_that_starves_is_noticed() -> None:
    assert broken(lambda forgery: forgery.job.update(tf=b"99000")) == {"I10"}


@pytest.mark.parametrize(("event", "status"), [("exit", 1), ("left", 1), ("left", -9)])
def test_a_process_that_ends_by_itself_or_does_not_drain_is_noticed(
    event: str, status: int
) -> None:
    assert broken(lambda forgery: forgery.event(event).update(status=status)) == {"I0"}


def test_the_finished_job_has_the_tokens_that_the_oracle_has() -> None:
    assert unpack(Forgery().truth.jobs[JOB]["res"])["ids"] == TOKENS


def lose(since: float, until: float) -> Spoil:
    """Make the broker lose the cancelled job, and say from when to when it lost what it had."""

    def spoil(forgery: Forgery) -> None:
        del forgery.truth.jobs[CANCELLED_JOB], forgery.truth.logs[CANCELLED_JOB]
        forgery.tell_again()
        forgery.events.append({"e": "loss", "t": until, "since": since, "until": until})

    return spoil


def test_a_job_may_be_lost_only_if_it_was_accepted_when_the_broker_was_made_to_lose() -> None:
    accepted_at = 1.0
    assert not broken(lose(accepted_at - 0.5, accepted_at + 0.5))
    assert broken(lose(accepted_at + 0.5, accepted_at + 1.0)) == {"I1"}


def test_a_reply_read_late_may_be_of_a_job_accepted_before_the_loss() -> None:
    submitted_at, lost_until, known_at = 0.3, 0.6, 1.0

    def spoil(forgery: Forgery) -> None:
        forgery.events.insert(0, {"e": "submit", "t": submitted_at, "ns": [1]})
        lose(submitted_at, lost_until)(forgery)

    assert lost_until < known_at
    assert not broken(spoil)


@pytest.mark.parametrize("batch", ["", "b1"])
def test_a_sweep_may_cancel_what_it_covers_and_nothing_else(batch: str) -> None:
    def spoil(forgery: Forgery) -> None:
        change_plan(forgery, 1, batch=batch)
        forgery.truth.batches.update({"default:b1": {"total": 1, "cancelled": 1}} if batch else {})
        forgery.truth.jobs[CANCELLED_JOB]["bid"] = batch.encode()
        sweep = Sweep(0, 0.5, 0, "default", batch)
        forgery.plan = replace(forgery.plan, sweeps=(sweep,))
        forgery.events[3:5] = [{"e": "sweep", "t": 3.0, "sweep": 0}]

    def spoil_elsewhere(forgery: Forgery) -> None:
        spoil(forgery)
        forgery.plan = replace(forgery.plan, sweeps=(Sweep(0, 0.5, 0, "blue", batch),))

    assert not broken(spoil)
    assert broken(spoil_elsewhere) == {"I1"}
