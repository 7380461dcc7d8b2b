"""I2 and I7: tokens are contiguous, the oracle's, and what is charged."""

from collections.abc import Iterator
from dataclasses import dataclass

from chaos.plan import JobPlan
from chaos.tokenlog import entries_of, state_of, unpack, words_of
from chaos.verdict import Entry, Run, Sight, Violation
from support.fake_engine import generate


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
    state, expected = state_of(stored), generate(job.prompt, job.num_tokens)
    if ids != expected[: len(ids)] or (state == "done" and ids != expected):
        yield f"{state} with {len(ids)} of {len(expected)} tokens, wrong or too few"
    if int(stored["n"]) != len(ids):
        yield f"n is {int(stored['n'])}, the log has {len(ids)} tokens"
    if state == "done":
        yield from _result_faults(stored, log, expected)


def _result_faults(
    stored: dict[str, bytes], log: list[Entry], expected: list[int]
) -> Iterator[str]:
    if "res" not in stored:
        yield "there is no result"
        return
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
    if sight.num_rereads and not run.losses:
        yield "had to begin anew, though the broker lost nothing"
    position, ids, text = 0, [], ""
    for chunk in sight.chunks:
        if chunk["start"] != position:
            yield f"chunk {chunk['start']}-{chunk['end']} after {position} tokens"
        position = chunk["end"]
        ids += chunk["ids"]
        text += chunk["text"]
    if len({end["state"] for end in sight.ends}) > 1:
        yield f"several ends: {[end['state'] for end in sight.ends]}"
    if run.losses:
        yield from _prefix_faults(run.by_number[number], ids)
    elif sight.ends:
        yield from _end_faults(run, number, job_id)
        told = Told.of(sight) if sight.result is not None else Told(ids, text)
        if sight.result is not None or run.by_number[number].follow != "result":
            yield from told.faults(log)


@dataclass(frozen=True, slots=True)
class Told:
    """Everything that one reader got."""

    ids: list[int]
    text: str

    @classmethod
    def of(cls, sight: Sight) -> "Told":
        """A reader of the whole result."""
        result = sight.result or {}
        return cls(list(result["ids"]), result["text"])

    def faults(self, log: list[Entry]) -> Iterator[str]:
        """How it differs from the log."""
        if self.ids != [token for entry in log for token in entry.ids]:
            yield f"saw {len(self.ids)} tokens, which are not those of the log"
        if self.text != "".join(entry.text for entry in log):
            yield "saw another text than that of the log"


def _end_faults(run: Run, number: int, job_id: str) -> Iterator[str]:
    end, state = run.sights[number].ends[-1], state_of(run.truth.jobs.get(job_id, {}))
    if end["state"] != state:
        yield f"told {end['state']} {end['error']}, the job is {state}"


def _prefix_faults(job: JobPlan, ids: list[int]) -> Iterator[str]:
    # What a reader saw may be lost and written again by another worker: the tokens are the same.
    if ids != generate(job.prompt, job.num_tokens)[: len(ids)]:
        yield f"saw {len(ids)} tokens, which are not the oracle's"


def check_usage(run: Run) -> Iterator[Violation]:
    """I7: what a job is charged is what it got."""
    for number, job_ids in run.accepted.items():
        for job_id in job_ids & run.truth.jobs.keys():
            stored = run.truth.jobs[job_id]
            if state_of(stored) != "done" or "res" not in stored:
                continue
            usage = unpack(stored["res"])["end"].get("usage", {})
            wanted = (len(run.by_number[number].prompt), int(stored["n"]))
            found = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
            if found != wanted:
                yield Violation("I7", number, f"usage {found} for {wanted} tokens")
