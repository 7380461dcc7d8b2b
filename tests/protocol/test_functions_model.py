"""The Redis Functions against a model, under lost replies, late calls, crashes and two versions.

Every rule makes its call once or twice, as after a lost reply; any call may come again much later.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support import shard
from support.shard import KEYS, QUEUE
from support.shard_comparison import Comparison
from support.shard_model import LIMITS, ShardModel, Terms
from support.versions import drop_versions, load_versions, run_version
from tidemill.protocol import calls
from tidemill.protocol.calls import JobRef, RetryPause
from tidemill.protocol.calls.replies import written
from tidemill.protocol.calls.submitting import metadata_text
from tidemill.protocol.codec import encode
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.functions import Call
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import JobEnd, JobResult, JobTerms

MIN_STEPS = 2000
#: Hypothesis decides how long an example is, so examples are run by the dozen until it is enough;
#: more of them where the profile asks for more than the usual hundred.
ROUNDS, EXAMPLES, STEPS_PER_EXAMPLE = 20, settings.default.max_examples // 4, 60

HOUR = 3_600_000
HALF_HOUR, TWO_HOURS = HOUR // 2, 2 * HOUR
#: Fields of a job's hash that hold the times of its limits.
TIMES = {"deadline": ("dl",), "queue_timeout": ("qdl",), "stalled": ("td", "tp")}

WORKERS = st.sampled_from(["wkr_a", "wkr_b"])
VERSIONS = st.lists(st.sampled_from([2, 3]), min_size=1, max_size=2)
TERMS = st.builds(
    Terms,
    key=st.sampled_from(["", "", "", "k", "b:1"]),
    digest=st.sampled_from(["a", "a", "b"]),
    batch=st.sampled_from(["", "", "b"]),
    delayed=st.sampled_from([False, False, True]),
    limits=st.frozensets(st.sampled_from(LIMITS)),
    max_retries=st.sampled_from([0, 0, 1, 2]),
    num_tokens=st.integers(0, 5),
    note=st.sampled_from(["", "", "é"]),
)

#: Bounds on waiting jobs and tokens.
BOUNDS = st.sampled_from([(100, 10_000)] * 4 + [(1, 10_000), (100, 4)])
#: A number from which a rule makes its choice of job.
PICK = st.integers(0, 2**16)
#: Who calls about an attempt: its worker, an earlier attempt, another worker with the right fence.
CALLER = st.sampled_from(["owner"] * 5 + ["stale", "other"])
OFF = st.sampled_from([0] * 5 + [1, -1])

Attempt = tuple[str, int, str]


mostly_if_running = precondition(lambda self: "run" in self.model.states or self.is_odd_moment)


class Functions(RuleBasedStateMachine):
    """Each ``_call`` does to the model and to the server the same, and compares their answers."""

    client: redis.Redis
    steps: Iterator[int]

    def __init__(self) -> None:
        super().__init__()
        self.client.flushdb()
        self.client.hset(KEYS.settings, "back:*", 10_000)
        self.client.hset(KEYS.hooks("default"), "on", 1)
        self.model = ShardModel()
        self.refs: dict[str, JobRef] = {}
        self.past: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.model.epoch = shard.lead(self.client, "sch_0")
        self.num_leaders = 1
        shard.run(self.client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))

    def _call(self, versions: list[int], action: Callable[..., Any], *args: Any) -> Any:
        next(self.steps)
        self.past.append((action, args))
        replies = [action(version, *args) for version in versions]
        return replies[0]

    def _run(self, version: int, call: Call[Any]) -> Any:
        try:
            return run_version(self.client, call, version)
        except TidemillError as error:
            return type(error).__name__

    @rule(number=st.integers(0, 10**6), versions=VERSIONS)
    def a_call_comes_again_late(self, number: int, versions: list[int]) -> None:
        if self.past:
            action, args = self.past[number % len(self.past)]
            self._call(versions, action, *args)

    @property
    def is_odd_moment(self) -> bool:
        """Whether calls may be made that should find nothing to do."""
        return bool(self.refs) and len(self.past) % 8 == 0

    def _pick(self, number: int, *states: str) -> str:
        """Return a job, mostly one in these states."""
        jobs = self.model.jobs
        fit = [job_id for job_id in self.refs if job_id in jobs and jobs[job_id].state in states]
        some = list(self.refs) if number % 5 == 0 or not fit else fit
        return some[number // 5 % len(some)]

    def _attempt(self, number: int, caller: str) -> Attempt:
        job_id = self._pick(number, "run")
        job = self.model.jobs.get(job_id)
        if job is None:
            return job_id, 1, "wkr_a"
        if caller == "other":
            return job_id, job.fence, "wkr_b" if job.worker == "wkr_a" else "wkr_a"
        return job_id, job.fence - (caller == "stale"), job.worker or "wkr_a"

    # Few jobs, so that stale attempts and takeovers meet on the same one.
    @precondition(lambda self: len(self.refs) < 8 and self.model.num_live < 3)
    @rule(terms=TERMS, bounds=BOUNDS, versions=VERSIONS)
    def submit(self, terms: Terms, bounds: tuple[int, int], versions: list[int]) -> None:
        job_id = new_job_id()
        self.client.hset(KEYS.settings, mapping={"jobs:*": bounds[0], "tokens:*": bounds[1]})
        self.model.max_jobs, self.model.max_tokens = bounds
        if self._call(versions, self._submit, job_id, terms) == (True, job_id):
            self.refs[job_id] = JobRef(job_id, QUEUE, terms.key, terms.batch)

    def _submit(self, version: int, job_id: str, terms: Terms) -> tuple[bool, str] | str:
        metadata = {"note": terms.note} if terms.note else {}
        note_bytes = len(metadata_text(metadata).encode())
        expected = self.model.submit(job_id, terms, len(encode(shard.REQUEST)), note_bytes)
        job = calls.NewJob(
            job_id,
            shard.REQUEST,
            num_tokens=terms.num_tokens,
            idempotency_key=terms.key,
            body_digest=terms.digest,
            terms=JobTerms(
                delay_ms=HALF_HOUR if terms.delayed else 0,
                deadline_ms=HOUR if "deadline" in terms.limits else 0,
                max_queue_ms=HOUR if "queue_timeout" in terms.limits else 0,
                stall_ms=HOUR if "stalled" in terms.limits else 0,
                max_retries=terms.max_retries,
                batch=terms.batch,
                metadata=metadata,
            ),
        )
        reply = self._run(version, calls.submit(KEYS, job))
        got = reply if isinstance(reply, str) else (reply.created, reply.job_id)
        assert got == expected
        return expected

    @rule(number=PICK, versions=VERSIONS)
    def upkeep(self, number: int, versions: list[int]) -> None:
        """One of the calls that would be too frequent with a rule for each."""
        kinds = [self.take_over, self.retire, self.somebody_adds_a_pointer, self.close_batch]
        kinds += [self.trim] * 2 * bool(self.model.ended)
        kinds[number % len(kinds)](number // len(kinds), versions)

    def close_batch(self, _number: int, versions: list[int]) -> None:
        if len(self.past) > 20:
            self._call(versions, self._close_batch)

    def _close_batch(self, version: int) -> None:
        self.model.close_batch("b")
        close = calls.close_batch(KEYS, tenant="default", batch="b", state="cancelled")
        assert self._run(version, close) == 1

    def take_over(self, _number: int, _versions: list[int]) -> None:
        old, new = self.num_leaders - 1, self.num_leaders
        shard.run(self.client, calls.resign(KEYS, scheduler_id=f"sch_{old}"))
        self.model.epoch += 1
        assert shard.lead(self.client, f"sch_{new}") == self.model.epoch
        self.num_leaders += 1

    def somebody_adds_a_pointer(self, number: int, _versions: list[int]) -> None:
        if not self.refs:
            return
        job_id = self._pick(number, "queued", "run")
        entry = self.client.xadd(KEYS.ingress(QUEUE), {"j": job_id}).decode()
        self.client.zadd(KEYS.active_queues, {QUEUE: 1}, nx=True)
        self.model.pointers[entry] = job_id

    @precondition(lambda self: self.model.pointers)
    @rule(number=PICK, worker=WORKERS, versions=VERSIONS)
    def dispatch(self, number: int, worker: str, versions: list[int]) -> None:
        pointers = list(self.model.pointers.items())
        entry, job_id = pointers[number % len(pointers)]
        self._call(versions, self._dispatch, job_id, entry, worker, self.model.epoch)

    def _dispatch(self, version: int, job_id: str, entry: str, worker: str, epoch: int) -> None:
        expected = self.model.dispatch(job_id, entry, worker, epoch)
        call = calls.dispatch(
            KEYS,
            job_id=job_id,
            queue=QUEUE,
            entry_id=entry,
            worker_id=worker,
            epoch=epoch,
            lease_ms=HOUR,
        )
        reply = self._run(version, call)
        assert (reply if isinstance(reply, str) else (reply.fence, reply.state)) == expected

    @mostly_if_running
    @rule(number=PICK, caller=CALLER, versions=VERSIONS)
    def claim(self, number: int, caller: str, versions: list[int]) -> None:
        attempt = self._attempt(number, caller)
        self._call(versions, self._claim, *attempt)
        self._call(versions, self._beat, *attempt)

    def _claim(self, version: int, job_id: str, fence: int, worker: str) -> None:
        expected = self.model.claim(job_id, fence, worker)
        call = calls.claim(KEYS, worker_id=worker, jobs=[(job_id, fence)])
        assert self._run(version, call) == [expected]

    def _beat(self, version: int, job_id: str, fence: int, worker: str) -> None:
        job = self.model.jobs.get(job_id)
        call = calls.beat(
            KEYS,
            worker_id=worker,
            model="m",
            tokenizer_digest="t",
            lease_ms=HOUR,
            jobs=[(job_id, fence)],
        )
        kept = job is not None and job.is_owned(fence, worker)
        assert self._run(version, call).lost == (() if kept else (job_id,))

    @mostly_if_running
    @rule(number=PICK, caller=CALLER, num=st.integers(1, 3), off=OFF, versions=VERSIONS)
    def append(self, number: int, caller: str, num: int, off: int, versions: list[int]) -> None:
        attempt = self._attempt(number, caller)
        self._call(versions, self._append, *attempt, self._position(attempt, off), num)

    def _append(
        self, version: int, job_id: str, fence: int, worker: str, start: int, num: int
    ) -> None:
        code = self.model.append(job_id, fence, worker, start, num)
        chunks = [(job_id, fence, shard.make_chunk(start, num))]
        call = calls.append(KEYS, worker_id=worker, chunks=chunks)
        assert self._run(version, call) == [written(code)]

    @mostly_if_running
    @rule(number=PICK, caller=CALLER, num=st.integers(0, 2), off=OFF, versions=VERSIONS)
    def finish(self, number: int, caller: str, num: int, off: int, versions: list[int]) -> None:
        attempt = self._attempt(number, caller)
        self._call(versions, self._finish, *attempt, self._position(attempt, off), num)

    def _finish(
        self, version: int, job_id: str, fence: int, worker: str, start: int, num: int
    ) -> None:
        ids = tuple(range(start + num))
        result = JobResult(end=JobEnd(state="done", finish_reason="stop"), ids=ids)
        size = len(encode(result))
        expected = self.model.finish(job_id, fence, worker, start, num, size)
        call = calls.finish(
            KEYS,
            self.refs[job_id],
            fence=fence,
            worker_id=worker,
            chunk=shard.make_chunk(start, num),
            result=result,
        )
        assert self._run(version, call) == written(*expected)

    def _position(self, attempt: Attempt, off: int) -> int:
        job = self.model.jobs.get(attempt[0])
        return max(0, (job.tokens if job else 0) + off)

    @mostly_if_running
    @rule(number=PICK, caller=CALLER, versions=VERSIONS)
    def release(self, number: int, caller: str, versions: list[int]) -> None:
        self._call(versions, self._release, *self._attempt(number, caller))

    def _release(self, version: int, job_id: str, fence: int, worker: str) -> None:
        expected = self.model.release(job_id, fence, worker)
        call = calls.release(KEYS, job_id=job_id, fence=fence, worker_id=worker, queue=QUEUE)
        assert self._run(version, call) == expected

    @mostly_if_running
    @rule(number=PICK, caller=CALLER, is_long=st.sampled_from([0, 0, 1]), versions=VERSIONS)
    def nack(self, number: int, caller: str, is_long: int, versions: list[int]) -> None:
        self._call(versions, self._nack, *self._attempt(number, caller), bool(is_long))

    def _nack(self, version: int, job_id: str, fence: int, worker: str, is_long: bool) -> None:
        expected = self.model.nack(job_id, fence, worker, is_long=is_long)
        pause_ms = TWO_HOURS if is_long else HALF_HOUR
        call = calls.nack(
            KEYS,
            self.refs[job_id],
            fence=fence,
            worker_id=worker,
            error="e",
            pause=RetryPause(base_ms=pause_ms, cap_ms=pause_ms, jitter=0.9),
        )
        assert self._run(version, call) == expected

    # Also for jobs that do not wait or run: index entries that a lost race would leave.
    @precondition(lambda self: "delayed" in self.model.states or self.is_odd_moment)
    @rule(number=PICK, is_ready=st.sampled_from([True, True, False]), versions=VERSIONS)
    def promote(self, number: int, is_ready: bool, versions: list[int]) -> None:
        self._call(versions, self._promote, self._pick(number, "delayed"), is_ready)

    def _promote(self, version: int, job_id: str, is_ready: bool) -> None:
        expected = self.model.promote(job_id, is_ready=is_ready)
        if is_ready:
            self.client.zadd(KEYS.delayed, {job_id: 1})
        call = calls.promote(KEYS, job_id=job_id, queue=QUEUE)
        assert self._run(version, call) == expected

    @mostly_if_running
    @rule(number=PICK, is_lapsed=st.sampled_from([True, True, False]), versions=VERSIONS)
    def reap(self, number: int, is_lapsed: bool, versions: list[int]) -> None:
        self._call(versions, self._reap, self._pick(number, "run"), is_lapsed)

    @precondition(lambda self: "run" in self.model.states)
    @rule(number=PICK, versions=VERSIONS)
    def a_worker_dies_of_its_job(self, number: int, versions: list[int]) -> None:
        job_id, fence, worker = self._attempt(number | 1, "owner")
        self._call(versions, self._claim, job_id, fence, worker)
        self._call(versions, self._reap, job_id, True)

    def _reap(self, version: int, job_id: str, is_lapsed: bool) -> None:
        expected = self.model.reap(job_id, is_lapsed=is_lapsed)
        if is_lapsed:
            self.client.zadd(KEYS.running, {job_id: 1})
        assert self._run(version, calls.reap(KEYS, self.refs[job_id], end=shard.DEAD)) == expected

    @mostly_if_running
    @rule(number=PICK, caller=CALLER, versions=VERSIONS)
    def cancel(self, number: int, caller: str, versions: list[int]) -> None:
        job_id, _, worker = self._attempt(number, caller)
        self._call(versions, self._cancel, job_id, worker)

    def _cancel(self, version: int, job_id: str, worker: str) -> None:
        expected = self.model.cancel(job_id, worker)
        call = calls.cancel(KEYS, self.refs[job_id], worker_id=worker, end=shard.CANCELLED)
        assert self._run(version, call) == expected

    @precondition(lambda self: self.model.num_limited or self.is_odd_moment)
    @rule(
        number=PICK,
        caller=st.sampled_from(["owner", "other"]),
        passing=st.sampled_from(["", *LIMITS]),
        looks=st.sampled_from([True, True, False]),
        versions=VERSIONS,
    )
    def expire(
        self, number: int, caller: str, passing: str, looks: bool, versions: list[int]
    ) -> None:
        job_id, _, worker = self._attempt(number, caller)
        if number % 2:
            job_id = self._pick(number, "queued", "delayed")
        self._call(versions, self._expire, job_id, worker, passing, looks)

    def _expire(self, version: int, job_id: str, worker: str, passing: str, looks: bool) -> None:
        job = self.model.jobs.get(job_id)
        if job and job.watches(passing):
            job.passed.add(passing)
            self.client.hset(KEYS.job(job_id), mapping=dict.fromkeys(TIMES[passing], 1))
        if looks:
            self.client.zadd(KEYS.due, {job_id: 1})
            if job:
                job.due = True
        expected = self.model.expire(job_id, worker)
        call = calls.expire(KEYS, self.refs[job_id], worker_id=worker)
        assert self._run(version, call) == expected

    def trim(self, number: int, versions: list[int]) -> None:
        if members := list(self.model.ended):
            self._call(versions, self._trim, members[number % len(members)])

    def _trim(self, version: int, member: str) -> None:
        expected = self.model.trim(member)
        call = calls.trim(KEYS, [(member, self.refs[calls.job_of(member)])])
        assert self._run(version, call) == expected

    @precondition(lambda self: self.model.letters)
    @rule(number=PICK, with_job=st.sampled_from([True, True, False]), versions=VERSIONS)
    def drop_letter(self, number: int, with_job: bool, versions: list[int]) -> None:
        letters = list(self.model.letters.items())
        self._call(versions, self._drop_letter, *letters[number % len(letters)], with_job)

    def _drop_letter(self, version: int, entry: str, job_id: str, with_job: bool) -> None:
        expected = self.model.drop_letter(entry, with_job=with_job)
        call = calls.drop_letter(KEYS, self.refs[job_id], entry_id=entry, with_job=with_job)
        assert self._run(version, call) == expected

    def retire(self, _number: int, versions: list[int]) -> None:
        self._call(versions, self._retire)

    def _retire(self, version: int) -> None:
        # A call within this very step may have added a pointer that is not bound yet.
        is_empty = not self.model.pointers and not self.model.unbound
        assert self._run(version, calls.retire(KEYS, QUEUE)) == is_empty

    @invariant()
    def the_server_holds_what_the_model_holds(self) -> None:
        comparison = Comparison(self.client, self.model)
        comparison.check_shard()
        comparison.check_jobs(self.refs)
        comparison.check_batch("b")


@pytest.mark.leaks_keys
def test_the_functions_keep_every_promise_under_retries_crashes_and_stale_callers(
    redis_client: redis.Redis,
) -> None:
    steps: list[int] = []

    def count() -> Iterator[int]:
        while True:
            steps.append(1)
            yield 1

    load_versions(redis_client, (3,))
    machine = type("BoundFunctions", (Functions,), {"client": redis_client, "steps": count()})
    began = time.monotonic()
    try:
        for _ in range(ROUNDS):
            if len(steps) < MIN_STEPS:
                run_state_machine_as_test(  # type: ignore[no-untyped-call]
                    machine,
                    settings=settings(
                        max_examples=EXAMPLES,
                        stateful_step_count=STEPS_PER_EXAMPLE,
                        deadline=None,
                        suppress_health_check=list(HealthCheck),
                    ),
                )
    finally:
        drop_versions(redis_client, (3,))
    print(f"{len(steps)} steps in {time.monotonic() - began:.1f} s")
    assert len(steps) >= MIN_STEPS
