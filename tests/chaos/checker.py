"""The offline checker: a recorded run in, violations of the invariants out.  Pure.

I1 every accepted job reaches exactly one terminal state, allowed by what was asked of it
I2 its tokens are contiguous and equal to the oracle's, in the log and for every subscriber
I3 one job per idempotency key; another body under the same key is refused
I4 counters return to zero, indexes are empty, no key lives for ever that should not
I6 every chunk is written by the holder of the latest claim; no epoch dispatches after a later one
I7 usage equals the tokens
I10 no job waits longer than ``MAX_WAIT_SECONDS`` for its first token, or than
    ``MAX_TRIAL_SECONDS`` if it was tried alone because its workers had died

I5 (webhooks) waits for webhooks; I8 (recovery time) and I9 (fairness) are measured, not judged.
"""

from collections.abc import Iterator
from typing import Any

import msgpack

from chaos.plan import JobPlan
from chaos.truth import LASTING_COUNTERS, short
from chaos.verdict import SEAL, TERMINAL, Entry, Run, Sight, Violation
from chaos.worker import UNAVAILABLE_STATUS, writer_tag
from support.fake_engine import generate
from tidemill.service.runtime import CRASH_STATUS

MAX_CRASHES = 3
MAX_WAIT_SECONDS = 40.0
MAX_TRIAL_SECONDS = 150.0


def check(run: Run) -> list[Violation]:
    """Judge a run."""
    return [violation for rule in RULES for violation in rule(run)]


def check_ends(run: Run) -> Iterator[Violation]:
    """I1: each accepted job is there, and ended once in a way it may end."""
    for number, job_ids in run.accepted.items():
        for job_id in job_ids:
            stored = run.truth.jobs.get(job_id)
            if stored is None:
                yield Violation("I1", number, f"{job_id} was accepted and is lost")
                continue
            yield from _check_end(run, run.by_number[number], job_id, stored)
    unknown = {i: s for i, s in run.truth.jobs.items() if i not in run.number_of()}
    for job_id, stored in unknown.items():
        if _state(stored) not in TERMINAL:
            yield Violation("I1", None, f"{job_id}, never confirmed, is {_state(stored)}")


def _check_end(
    run: Run, job: JobPlan, job_id: str, stored: dict[str, bytes]
) -> Iterator[Violation]:
    state = _state(stored)
    ends = [entry for entry in entries_of(run, job_id) if entry.end is not None]
    if state not in TERMINAL:
        yield Violation("I1", job.number, f"{job_id} is {state} at the end")
        return
    if len(ends) != 1 or ends[0].writer != SEAL or ends[0].end is None:
        yield Violation("I1", job.number, f"{len(ends)} terminal entries, sealed or not")
    elif ends[0].end["state"] != state:
        yield Violation("I1", job.number, f"{state}, but its log says {ends[0].end['state']}")
    if entries_of(run, job_id)[-1:] != ends[-1:]:
        yield Violation("I1", job.number, "the log goes on after its end")
    if state not in _allowed_states(run, job, stored):
        error = ends[0].end.get("error") if ends and ends[0].end else None
        yield Violation("I1", job.number, f"it may not end as {state}: {error}")


def _allowed_states(run: Run, job: JobPlan, stored: dict[str, bytes]) -> set[str]:
    allowed = {"dead"} if job.is_poison else {"done"}
    if job.number in run.cancels:
        allowed.add("cancelled")
    if int(stored.get("cr", b"0")) >= MAX_CRASHES:
        # So many workers died in its company: it shared their fate, as documented.
        allowed.add("dead")
    return allowed


def check_logs(run: Run) -> Iterator[Violation]:
    """I2 for the token log, the stored result and the count in the job."""
    for number, job_ids in run.accepted.items():
        job = run.by_number[number]
        for job_id in job_ids & run.truth.jobs.keys():
            for what in _log_faults(run, job, job_id):
                yield Violation("I2", number, what)


def _log_faults(run: Run, job: JobPlan, job_id: str) -> Iterator[str]:
    stored, log = run.truth.jobs[job_id], entries_of(run, job_id)
    ids: list[int] = []
    for entry in log:
        if entry.start is not None and entry.start != len(ids):
            yield f"entry at {entry.start} after {len(ids)} tokens"
        ids += entry.ids
        if entry.num_tokens != len(ids):
            yield f"entry id says {entry.num_tokens} tokens, there are {len(ids)}"
    state, expected = _state(stored), generate(job.prompt, job.num_tokens)
    if ids != expected[: len(ids)] or (state == "done" and ids != expected):
        yield f"{state} with {len(ids)} of {len(expected)} tokens, wrong or too few"
    if int(stored["n"]) != len(ids):
        yield f"n is {int(stored['n'])}, the log has {len(ids)} tokens"
    if state == "done":
        result, text = unpack(stored["res"]), "".join(entry.text for entry in log)
        if list(result["ids"]) != expected or result["text"] != text:
            yield "the stored result is not what the log says"
        if words_of(text) != expected:
            yield "the text is not that of the tokens"


def check_subscribers(run: Run) -> Iterator[Violation]:
    """I2 for everyone who read a stream or a result: each token once, in order, and one end."""
    for number, sight in run.sights.items():
        [job_id, *_] = run.accepted[number] or {""}
        log = entries_of(run, job_id)
        for what in _sight_faults(run, number, sight, log, job_id):
            yield Violation("I2", number, f"a subscriber: {what}")
    for job in run.plan.jobs:
        if job.follow != "none" and job.number in run.accepted and not run.sights[job.number].ends:
            yield Violation("I2", job.number, "a subscriber never saw the end")


def _sight_faults(
    run: Run, number: int, sight: Sight, log: list[Entry], job_id: str
) -> Iterator[str]:
    position, ids, text = 0, [], ""
    for chunk in sight.chunks:
        if chunk["start"] != position:
            yield f"chunk {chunk['start']}-{chunk['end']} after {position} tokens"
        position = chunk["end"]
        ids += chunk["ids"]
        text += chunk["text"]
    if len({end["state"] for end in sight.ends}) > 1:
        yield f"several ends: {[end['state'] for end in sight.ends]}"
    if not sight.ends:
        return
    state = _state(run.truth.jobs.get(job_id, {}))
    if sight.ends[-1]["state"] != state:
        yield f"told {sight.ends[-1]['state']} {sight.ends[-1]['error']}, the job is {state}"
    if sight.result is not None:
        ids, text = list(sight.result["ids"]), sight.result["text"]
    elif run.by_number[number].follow == "result":
        return
    if ids != [token for entry in log for token in entry.ids]:
        yield f"saw {len(ids)} tokens, which are not those of the log"
    if text != "".join(entry.text for entry in log):
        yield "saw another text than that of the log"


def check_keys(run: Run) -> Iterator[Violation]:
    """I3: a key names one job, whoever uses it and however often."""
    for number, job_ids in run.accepted.items():
        if len(job_ids) > 1:
            yield Violation("I3", number, f"several jobs: {short(sorted(job_ids))}")
    for event in run.of("conflict"):
        if not event["refused"]:
            yield Violation("I3", event["n"], f"another body was accepted: {event['outcome']}")
    spare = len(run.truth.jobs.keys() - run.number_of().keys())
    unsure = [
        job.number
        for job in run.plan.jobs
        if not run.accepted.get(job.number) and (not job.key or job.rival is not None)
    ]
    if spare > len(unsure):
        yield Violation("I3", None, f"{spare} jobs beside {len(unsure)} unconfirmed submissions")


def check_leaks(run: Run) -> Iterator[Violation]:
    """I4: nothing is left in counters and indexes, and every key will go one day."""
    left = {k: v for k, v in run.truth.counters.items() if k not in LASTING_COUNTERS}
    if left:
        yield Violation("I4", None, f"counters are left: {left}")
    for name, size in run.truth.indexes.items():
        if size:
            yield Violation("I4", None, f"{name} still has {size} entries")
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


def check_usage(run: Run) -> Iterator[Violation]:
    """I7: what a job is charged is what it got."""
    for number, job_ids in run.accepted.items():
        for job_id in job_ids & run.truth.jobs.keys():
            stored = run.truth.jobs[job_id]
            if _state(stored) != "done":
                continue
            usage = unpack(stored["res"])["end"].get("usage", {})
            wanted = (len(run.by_number[number].prompt), int(stored["n"]))
            found = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
            if found != wanted:
                yield Violation("I7", number, f"usage {found} for {wanted} tokens")


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


RULES = (
    check_ends,
    check_logs,
    check_subscribers,
    check_keys,
    check_leaks,
    check_writers,
    check_epochs,
    check_usage,
    check_waits,
    check_processes,
)


def entries_of(run: Run, job_id: str) -> list[Entry]:
    """A token log, decoded."""
    return [_entry(entry_id, fields) for entry_id, fields in run.truth.logs.get(job_id, [])]


def _entry(entry_id: str, fields: dict[str, bytes]) -> Entry:
    writer, _, count = entry_id.partition("-")
    chunk = unpack(fields["d"]) if "d" in fields else {}
    return Entry(
        writer=writer,
        num_tokens=int(count),
        start=int(fields["s"]) if "s" in fields else None,
        ids=tuple(chunk.get("ids", ())),
        text=chunk.get("text", ""),
        claimant=fields["c"].decode() if "c" in fields else None,
        end=unpack(fields["e"]) if "e" in fields else None,
    )


def unpack(data: bytes) -> Any:
    """Decode a message without the models of the code under test: a version byte and a map."""
    return msgpack.unpackb(data[1:], raw=False)


def words_of(text: str) -> list[int]:
    """The tokens that a text stands for."""
    return [int(word.partition("@")[0]) for word in text.split()]


def tags_of(text: str) -> set[str]:
    """Who generated a text."""
    return {word.partition("@")[2] for word in text.split()}


def _state(stored: dict[str, bytes]) -> str:
    return stored.get("st", b"gone").decode()


def _command_ms(command: str) -> int:
    return int(command.partition("-")[0])
