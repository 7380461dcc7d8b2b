"""Small records of runs made by hand: a flawless one, which tests then spoil in one place each."""

import copy
from collections.abc import Mapping
from typing import Any

import msgpack

from chaos.history import Event
from chaos.plan import JobPlan, Plan
from chaos.truth import Truth
from chaos.verdict import SEAL, Run
from chaos.worker import writer_tag
from support.fake_engine import generate

OLD_WORKER, WORKER = "wkr_00000000OLDONE", "wkr_00000000NEWONE"
JOB, CANCELLED_JOB, POISON_JOB = "job_a", "job_b", "job_c"
PROMPT = (1000, 1001, 40_000, 0)
TOKENS = generate(PROMPT, 4)

Log = list[tuple[str, dict[str, bytes]]]


def message(fields: Mapping[str, Any]) -> bytes:
    """A message as it is on the wire."""
    return b"\x01" + bytes(msgpack.packb(dict(fields)))


def text_of(ids: list[int], worker: str) -> str:
    """What a worker makes of tokens."""
    return "".join(f"{token}@{writer_tag(worker)} " for token in ids)


def claim(fence: int, num_tokens: int, worker: str) -> tuple[str, dict[str, bytes]]:
    """A claim marker."""
    return f"{fence}-{num_tokens}", {"c": worker.encode()}


def chunk(
    fence: int | str, start: int, end: int, worker: str, state: str = ""
) -> tuple[str, dict[str, bytes]]:
    """An entry with the oracle's tokens; with ``state`` the last one."""
    ids = TOKENS[start:end]
    data = {"start": start, "end": end, "ids": ids, "text": text_of(ids, worker)}
    fields = {"s": str(start).encode(), "d": message(data)}
    if state:
        fields["e"] = message({"state": state, "finish_reason": "length"})
    return f"{fence}-{end}", fields


def plan(**changes: Any) -> Plan:
    """Three jobs: one that a second worker finished, one cancelled, one that kills workers."""
    job = JobPlan(0, 0.0, 0, PROMPT, 4, key="k0", follow="stream", conflict=True, batch="b0")
    cancelled = JobPlan(1, 0.0, 0, (*PROMPT, 1), 4, key="k1", cancel_after=0.1)
    poison = JobPlan(2, 0.0, 0, (*PROMPT, 666), 4, key="k2")
    return Plan(0, 1.0, (job, cancelled, poison), ())


def truth() -> Truth:
    """What the broker holds after a run without fault."""
    base = {"ts": b"1000", "te": b"9000", "tn": b"default", "at": b"1", "mx": b"3", "cr": b"0"}
    text = text_of(TOKENS[:2], OLD_WORKER) + text_of(TOKENS[2:], WORKER)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 4}
    result = {"ids": TOKENS, "text": text, "end": {"state": "done", "usage": usage}}
    done = {"st": b"done", "n": b"4", "at": b"2", "tf": b"1500", "td": b"2000", "bid": b"b0"}
    cut = message({"state": "cancelled", "finish_reason": "cancelled"})
    died = message({"state": "dead", "finish_reason": "error"})
    return Truth(
        jobs={
            JOB: {**base, **done, "res": message(result)},
            CANCELLED_JOB: {**base, "st": b"cancelled", "n": b"0"},
            POISON_JOB: {**base, "st": b"dead", "n": b"0", "at": b"3", "cr": b"3"},
        },
        logs={
            JOB: [
                claim(1, 0, OLD_WORKER),
                chunk(1, 0, 2, OLD_WORKER),
                claim(2, 2, WORKER),
                chunk(2, 2, 3, WORKER),
                chunk(SEAL, 3, 4, WORKER, state="done"),
            ],
            CANCELLED_JOB: [(f"{SEAL}-0", {"s": b"0", "e": cut})],
            POISON_JOB: [claim(3, 0, WORKER), (f"{SEAL}-0", {"s": b"0", "e": died})],
        },
        counters={"rb": "77"},
        indexes={"run": 0, "act": 0, "dly": 0, "due": 0, "in": 0},
        batches={"default:b0": {"total": 1, "done": 1}},
        kept_bytes=77,
        dead_letters=[{"j": POISON_JOB, "r": "crashed its workers"}],
    )


def events() -> list[Event]:
    """What the processes recorded."""
    texts = [text_of(TOKENS[:2], OLD_WORKER), text_of(TOKENS[2:], WORKER)]
    halves = ((0, 2, texts[0]), (2, 4, texts[1]))
    dispatches = ((1, 1, OLD_WORKER, "1000-0"), (2, 2, WORKER, "2000-0"))
    told = [
        *({"e": "accepted", "n": n, "job": job} for n, job in enumerate((JOB, CANCELLED_JOB))),
        {"e": "accepted", "n": 2, "job": POISON_JOB},
        {"e": "cancel", "n": 1},
        {"e": "cancelled", "n": 1, "state": "cancelled"},
        {"e": "conflict", "n": 0, "refused": True, "outcome": "IdempotencyConflict"},
        *(
            {"e": "chunk", "n": 0, "start": s, "end": e, "ids": TOKENS[s:e], "text": text}
            for s, e, text in halves
        ),
        {"e": "followed", "n": 0, "state": "done", "error": ""},
        *(
            {"e": "dispatch", "job": JOB, "epoch": epoch, "fence": fence, "worker": worker}
            | {"command": command}
            for epoch, fence, worker, command in dispatches
        ),
        {"e": "exit", "name": "worker0-1", "status": -9},
        {"e": "left", "name": "worker0-2", "status": 0},
    ]
    return [{"t": float(index), **event} for index, event in enumerate(told)]


class Forgery:
    """A flawless run whose parts a test may change before it is judged."""

    def __init__(self) -> None:
        self.plan = plan()
        self.truth = truth()
        self.events = copy.deepcopy(events())
        self.tell_again()

    @property
    def job(self) -> dict[str, bytes]:
        """The hash of the job that was finished."""
        return self.truth.jobs[JOB]

    @property
    def log(self) -> Log:
        """Its token log."""
        return self.truth.logs[JOB]

    def tell_again(self) -> None:
        """Tell at the back door what the jobs say now."""
        self.truth.back_doors = [
            (stored["tn"].decode(), {"j": job_id, "s": stored["st"].decode()})
            for job_id, stored in self.truth.jobs.items()
        ]

    def event(self, kind: str) -> Event:
        """The last event of a kind."""
        return [event for event in self.events if event["e"] == kind][-1]

    def run(self) -> Run:
        """The record."""
        return Run(self.plan, self.events, self.truth)
