"""The Redis Functions against a simple model, under lost replies, crashes and stale callers."""

from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id

WORKERS = st.sampled_from(["wkr_a", "wkr_b"])
REPEAT = st.integers(1, 2)


@dataclass
class ModelJob:
    """What must be true of one job, kept by the test alone."""

    state: str = "queued"
    fence: int = 0
    tokens: int = 0
    tokens_at_claim: int = 0
    crashes: int = 0
    claimed: int = 0
    worker: str = ""
    writers: set[int] = field(default_factory=set)


class Functions(RuleBasedStateMachine):
    """Every rule makes its call once or twice: the second stands for a retry after a lost reply."""

    client: redis.Redis
    jobs = Bundle("jobs")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.client.flushdb()
        self.model: dict[str, ModelJob] = {}
        self.epoch = shard.lead(self.client, "sch_0")
        self.leader = 0

    # Few jobs, so that stale claims and takeovers meet on the same one.
    @precondition(lambda self: len(self.model) < 3)
    @rule(target=jobs, repeat=REPEAT)
    def submit(self, repeat: int) -> str:
        job_id = new_job_id()
        for _ in range(repeat):
            shard.submit(self.client, job_id)
        self.model[job_id] = ModelJob()
        return job_id

    @rule()
    def another_scheduler_takes_over(self) -> None:
        run(self.client, calls.resign(KEYS, scheduler_id=f"sch_{self.leader}"))
        self.leader += 1
        new = shard.lead(self.client, f"sch_{self.leader}")
        assert new == self.epoch + 1
        self.epoch = new

    @rule(target=claims, job_id=jobs, worker=WORKERS, repeat=REPEAT)
    def dispatch(self, job_id: str, worker: str, repeat: int) -> tuple[str, int]:
        job = self.model[job_id]
        fences = [
            shard.dispatch(self.client, job_id, self.epoch, worker).fence for _ in range(repeat)
        ]
        if job.state != "queued":
            assert set(fences) == {0}
            return job_id, job.fence
        job.fence += 1
        assert fences == [job.fence, 0][:repeat]
        job.state, job.worker, job.tokens_at_claim = "run", worker, job.tokens
        return job_id, job.fence

    @rule(job_id=jobs, worker=WORKERS)
    def a_deposed_scheduler_dispatches(self, job_id: str, worker: str) -> None:
        with pytest.raises(StaleEpoch):
            shard.dispatch(self.client, job_id, self.epoch - 1, worker)

    @rule(attempt=claims, worker=WORKERS, repeat=REPEAT)
    def claim(self, attempt: tuple[str, int], worker: str, repeat: int) -> None:
        job_id, fence = attempt
        job = self.model[job_id]
        ours = job.state == "run" and (job.fence, job.worker) == (fence, worker)
        replies = [shard.claim(self.client, job_id, fence, worker) for _ in range(repeat)]
        assert set(replies) == {ours}
        if ours:
            job.claimed = fence

    @rule(claim=claims, num=st.integers(1, 3), repeat=REPEAT)
    def append(self, claim: tuple[str, int], num: int, repeat: int) -> None:
        job_id, fence = claim
        job = self.model[job_id]
        replies = [shard.append(self.client, job_id, fence, job.tokens, num) for _ in range(repeat)]
        if job.state == "run" and job.fence == fence:
            assert replies[0].accepted
            job.tokens += num
            job.crashes = 0
            job.writers.add(fence)
            assert all(reply.num_tokens == job.tokens for reply in replies[1:])
        else:
            assert not any(reply.accepted or reply.owned for reply in replies)

    @rule(claim=claims, behind=st.integers(1, 5))
    def append_at_the_wrong_position(self, claim: tuple[str, int], behind: int) -> None:
        job_id, fence = claim
        job = self.model[job_id]
        reply = shard.append(self.client, job_id, fence, job.tokens + behind, 1)
        assert not reply.accepted
        if job.state == "run" and job.fence == fence:
            assert reply.num_tokens == job.tokens

    @rule(claim=claims, num=st.integers(0, 2), repeat=REPEAT)
    def finish(self, claim: tuple[str, int], num: int, repeat: int) -> None:
        job_id, fence = claim
        job = self.model[job_id]
        replies = [shard.finish(self.client, job_id, fence, job.tokens, num) for _ in range(repeat)]
        if job.state == "run" and job.fence == fence:
            assert replies[0].accepted
            job.state, job.tokens = "done", job.tokens + num
        assert not any(reply.accepted for reply in replies[1:])
        assert replies[-1].state == job.state or job.fence != fence

    @rule(job_id=jobs, worker=WORKERS, repeat=REPEAT)
    def cancel(self, job_id: str, worker: str, repeat: int) -> None:
        job = self.model[job_id]
        before = job.state
        codes = [shard.cancel(self.client, job_id, worker)[0] for _ in range(repeat)]
        if before == "queued" or (before == "run" and job.worker == worker):
            assert codes == [1, 0][:repeat]
            job.state = "cancelled"
        else:
            assert set(codes) == {-2 if before == "run" else 0}

    @rule(job_id=jobs, expired=st.booleans(), repeat=REPEAT)
    def reap(self, job_id: str, expired: bool, repeat: int) -> None:
        job = self.model[job_id]
        if expired:
            # Also for a job that is not running: an index entry left by a lost race.
            self.client.zadd(KEYS.running, {job_id: 1})
        codes = [shard.reap(self.client, job_id) for _ in range(repeat)]
        if not expired or job.state != "run":
            assert set(codes) == {0}
            return
        crashed = job.tokens == job.tokens_at_claim and job.claimed == job.fence
        if job.tokens != job.tokens_at_claim:
            job.crashes = 0
        job.crashes += crashed
        dead = crashed and job.crashes >= calls.MAX_CRASHES
        assert codes == [2 if dead else 1, 0][:repeat]
        job.state = "dead" if dead else "queued"

    @rule(claim=consumes(claims), repeat=REPEAT)
    def release(self, claim: tuple[str, int], repeat: int) -> None:
        job_id, fence = claim
        job = self.model[job_id]
        call = calls.release(KEYS, job_id=job_id, fence=fence, worker_id="wkr_a", queue=QUEUE)
        released = [run(self.client, call) for _ in range(repeat)]
        ours = job.state == "run" and job.fence == fence
        assert released == [ours, False][:repeat]
        if ours:
            job.state = "queued"

    @rule()
    def retire(self) -> None:
        queued = any(job.state == "queued" for job in self.model.values())
        assert run(self.client, calls.retire(KEYS, QUEUE)) != queued

    @invariant()
    def every_job_is_as_the_model_says(self) -> None:
        for job_id, job in self.model.items():
            stored = self.client.hmget(KEYS.job(job_id), "st", "f", "n")
            assert stored == [job.state.encode(), b"%d" % job.fence, b"%d" % job.tokens]
            log = shard.read_log(self.client, job_id)
            assert log.ids == list(range(job.tokens))
            terminal = job.state in ("done", "cancelled", "dead")
            assert log.terminals == ([job.state] if terminal else [])
            ttl = self.client.pttl(KEYS.job(job_id))
            assert (ttl > 0) == terminal

    @invariant()
    def the_indexes_agree_with_the_jobs(self) -> None:
        states = [job.state for job in self.model.values()]
        running = {job_id.encode() for job_id, job in self.model.items() if job.state == "run"}
        assert set(self.client.zrange(KEYS.running, 0, -1)) == running
        assert self.client.xlen(KEYS.ingress(QUEUE)) == states.count("queued")
        expected = {
            name: b"%d" % states.count(state)
            for name, state in ((b"q:default", "queued"), (b"r:default", "run"))
            if states.count(state)
        }
        counts = self.client.hgetall(KEYS.counters)
        assert {name: num for name, num in counts.items() if name[:2] in (b"q:", b"r:")} == expected


@pytest.mark.leaks_keys
def test_the_functions_keep_every_promise_under_retries_crashes_and_stale_callers(
    redis_client: redis.Redis,
) -> None:
    machine = type("BoundFunctions", (Functions,), {"client": redis_client})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
