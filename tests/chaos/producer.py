"""A producer process: submits, follows and cancels its share of a plan, and survives its death.

A killed producer starts again with its own record: what was accepted is not submitted again, what
was perhaps accepted is submitted again under the same key, and a stream is resumed where its last
recorded chunk ended.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from chaos.memory import Memory
from chaos.plan import TENANTS, JobPlan, Sweep, make_plan
from chaos.process import ProcessSpec
from chaos.raw import RawProducer
from tidemill import AsyncJob, AsyncProducer, JobSpec
from tidemill.protocol.errors import (
    BatchClosed,
    BrokerError,
    BrokerUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFound,
    Overloaded,
    QueueFull,
    TidemillError,
    UnknownModel,
)

T = TypeVar("T")

_TIMEOUT_SECONDS = 3.0
_RETRY_SECONDS = 0.2


class Workload:
    """One producer's part of a plan."""

    def __init__(self, spec: ProcessSpec) -> None:
        plan = make_plan(spec.seed, spec.num_jobs, spec.seconds)
        self._spec = spec
        self._rng = random.Random(spec.name)
        self._memory = Memory.load(Path(spec.directory), spec.index)
        self._recorder = spec.recorder
        self._sweeps = [sweep for sweep in plan.sweeps if sweep.producer == spec.index]
        self._raw = RawProducer(spec.url)
        self._jobs = [job for job in plan.jobs if spec.index in (job.producer, job.rival)]
        self._producers: dict[str, AsyncProducer] = {}

    async def run(self) -> None:
        """Do everything that earlier lives have not done."""
        for tenant in TENANTS:
            self._producers[tenant] = AsyncProducer(
                self._spec.url, tenant=tenant, timeout=_TIMEOUT_SECONDS
            )
        groups: dict[tuple[float, str], list[JobPlan]] = defaultdict(list)
        for job in self._jobs:
            groups[job.at, job.tenant].append(job)
        async with asyncio.TaskGroup() as tasks:
            for (at, _), jobs in sorted(groups.items()):
                tasks.create_task(self._run_group(tasks, at, jobs))
            for sweep in self._sweeps:
                if sweep.number not in self._memory.swept:
                    tasks.create_task(self._sweep(sweep))
        for producer in self._producers.values():
            await producer.close()
        await self._raw.close()

    async def _run_group(self, tasks: asyncio.TaskGroup, at: float, jobs: list[JobPlan]) -> None:
        await self._sleep_until(at)
        known = self._memory.accepted
        for job in jobs:
            if job.number in known:
                self._attend(tasks, job, known[job.number])
        # Nobody may repeat a submission without a key whose reply was lost.
        settled = known.keys() | self._memory.closed
        pending = [
            job
            for job in jobs
            if job.number not in settled and (job.key or job.number not in self._memory.tried)
        ]
        for job in pending:
            if job.is_raw:
                tasks.create_task(self._submit_raw(tasks, job))
        pending = [job for job in pending if not job.is_raw]
        while pending:
            pending = await self._submit(tasks, pending)

    async def _submit(self, tasks: asyncio.TaskGroup, jobs: list[JobPlan]) -> list[JobPlan]:
        """Submit once; returns what must be submitted again."""
        self._recorder.record("submit", ns=[job.number for job in jobs])
        producer = self._producers[jobs[0].tenant]
        try:
            outcomes = await producer.submit_many([_job_spec(job) for job in jobs])
        except BrokerError:
            await asyncio.sleep(_RETRY_SECONDS)
            return [job for job in jobs if job.key]
        except Overloaded:
            # Memory was too full even for the tenant's salt: nothing was submitted.
            await asyncio.sleep(_RETRY_SECONDS)
            return jobs
        again = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Overloaded | UnknownModel):
                self._recorder.record("refused", n=job.number, error=type(outcome).__name__)
                again.append(job)
            elif isinstance(outcome, BatchClosed):
                self._recorder.record("closed", n=job.number)
            elif isinstance(outcome, TidemillError):
                raise outcome
            else:
                self._recorder.record("accepted", n=job.number, job=outcome.id)
                self._attend(tasks, job, outcome.id)
        if again:
            await asyncio.sleep(_RETRY_SECONDS)
        return again

    async def _submit_raw(self, tasks: asyncio.TaskGroup, job: JobPlan) -> None:
        while True:
            self._recorder.record("submit", ns=[job.number])
            answer = await self._raw.submit(job)
            if answer is not None:
                break
            # Without an answer the same body goes in again, under the same key.
            await asyncio.sleep(_RETRY_SECONDS)
        if "job" in answer:
            self._recorder.record("accepted", n=job.number, job=answer["job"])
            self._attend(tasks, job, answer["job"])
        else:
            self._recorder.record("closed", n=job.number, error=answer["error"])

    async def _sweep(self, sweep: Sweep) -> None:
        await self._sleep_until(sweep.at)
        producer = self._producers[sweep.tenant]
        self._recorder.record("sweep", sweep=sweep.number)
        if sweep.batch:
            counts = await _retry(lambda: producer.cancel_batch(sweep.batch))
        else:
            counts = await _retry(producer.cancel_tenant)
        self._recorder.record("swept", sweep=sweep.number, counts=repr(counts))

    async def _sleep_until(self, at: float) -> None:
        await asyncio.sleep(self._spec.started + at - time.monotonic())

    def _attend(self, tasks: asyncio.TaskGroup, job: JobPlan, job_id: str) -> None:
        number, memory = job.number, self._memory
        if job.producer != self._spec.index:
            return
        if job.follow == "result" and number not in memory.followed:
            tasks.create_task(self._await_result(job, job_id))
        elif job.follow != "none" and number not in memory.followed:
            tasks.create_task(self._follow(job, job_id))
        if job.cancel_after is not None and number not in memory.cancelled:
            tasks.create_task(self._cancel(job, job_id))
        if job.conflict and number not in memory.refused:
            tasks.create_task(self._conflict(job))

    async def _follow(self, job: JobPlan, job_id: str) -> None:
        position, cursor = self._memory.cursors.get(job.number, (0, ""))
        while True:
            # Both ways of resuming: after an event id, and after a number of tokens.
            after = cursor if cursor and self._rng.random() < 0.5 else position
            stream = self._producers[job.tenant].stream(job_id, after=after)
            leave_after = self._rng.randint(1, 4) if job.follow == "reattach" else 1 << 30
            try:
                async for chunk in stream:
                    position, cursor = chunk.end, chunk.event_id
                    self._record_chunk(job.number, chunk)
                    leave_after -= 1
                    if not leave_after:
                        await stream.close()
                        break
                else:
                    return self._record_end(job, "done")
            except BrokerUnavailable:
                continue
            except InvalidRequest:
                # The place is inside a chunk now: only a server that lost a tail cuts anew.
                self._recorder.record("reread", n=job.number)
                position, cursor = 0, ""
            except JobError as error:
                return self._record_end(job, _state_of(error), str(error))

    def _record_chunk(self, number: int, chunk: Any) -> None:
        self._recorder.record(
            "chunk",
            n=number,
            start=chunk.start,
            end=chunk.end,
            ids=chunk.ids,
            text=chunk.text,
            id=chunk.event_id,
        )

    def _record_end(self, job: JobPlan, state: str, error: str = "") -> None:
        self._recorder.record("followed", n=job.number, state=state, error=error)

    async def _await_result(self, job: JobPlan, job_id: str) -> None:
        try:
            result = await _retry(lambda: self._producers[job.tenant].result(job_id))
        except JobError as error:
            return self._record_end(job, _state_of(error), str(error))
        self._recorder.record("result", n=job.number, ids=result.token_ids, text=result.text)
        self._record_end(job, "done")

    async def _cancel(self, job: JobPlan, job_id: str) -> None:
        await asyncio.sleep(job.cancel_after or 0)
        self._recorder.record("cancel", n=job.number)
        try:
            state = await _retry(lambda: self._producers[job.tenant].cancel(job_id))
        except JobNotFound:
            state = "gone"
        self._recorder.record("cancelled", n=job.number, state=str(state))

    async def _conflict(self, job: JobPlan) -> None:
        other = _job_spec(job)
        other.options["max_tokens"] = job.num_tokens + 1
        producer = self._producers[job.tenant]
        outcome: AsyncJob | TidemillError = QueueFull("not tried", retry_after_seconds=0)
        while isinstance(outcome, Overloaded):
            [outcome] = await _retry(lambda: producer.submit_many([other]))
            await asyncio.sleep(_RETRY_SECONDS)
        refused = isinstance(outcome, IdempotencyConflict)
        self._recorder.record("conflict", n=job.number, refused=refused, outcome=repr(outcome))


async def _retry(action: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await action()
        except (BrokerUnavailable, Overloaded):
            await asyncio.sleep(_RETRY_SECONDS)


def _job_spec(job: JobPlan) -> JobSpec:
    return JobSpec(
        job.prompt,
        model="m",
        max_tokens=job.num_tokens,
        temperature=0,
        ignore_eos=True,
        priority=job.priority,
        stream=job.stream,
        delay=job.delay or None,
        deadline=job.deadline or None,
        max_queue=job.max_queue or None,
        stall_timeout=job.stall or None,
        batch=job.batch or None,
        idempotency_key=job.key or None,
    )


def _state_of(error: JobError) -> str:
    if isinstance(error, JobCancelled):
        return "cancelled"
    if isinstance(error, JobFailed):
        return error.state
    return type(error).__name__


def main(spec: ProcessSpec) -> int:
    """Run to the end of the workload."""
    asyncio.run(Workload(spec).run())
    return 0
