"""Figures beside the rates: latency of a submit, memory of a job, the worker's share of a step."""

import statistics
import time
from typing import Any

from queue_meter import Server
from queue_stages import CHUNKS_PER_RESULT, KEYS, MAX_PER_CALL, QUEUE, WORKER, JobSet, prepare

from tidemill.protocol import calls
from tidemill.protocol.calls import JobRef
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbox import PublishPolicy, Update
from tidemill_gpuworker.shell.publisher import Publisher

STEP_SECONDS = 0.050


def measure_latency(server: Server, num: int) -> dict[str, float]:
    """Submit one job at a time with one client: ms from call to receipt."""
    server.empty()
    prepare(server.client)
    request = JobSet(1).request
    times = []
    for _ in range(num):
        job = calls.NewJob(new_job_id(), request, cost=500, num_tokens=756)
        started = time.perf_counter()
        run(server.client, calls.submit(KEYS, job))
        times.append(1000 * (time.perf_counter() - started))
    return {"submit_p50_ms": statistics.median(times), "submit_p99_ms": percentile(times, 0.99)}


def measure_memory(server: Server, num: int) -> dict[str, float]:
    """Bytes of a job with a 2 kB prompt: waiting, and running with 10 chunks of 160 B."""
    server.empty()
    epoch = prepare(server.client)
    before, jobs = server.used_memory, JobSet(num)
    jobs.submit().run_calls(server)
    queued = server.used_memory
    jobs.dispatch(server.client, epoch).run_calls(server)
    for _ in range(CHUNKS_PER_RESULT):
        jobs.append(MAX_PER_CALL).run_calls(server)
    running = server.used_memory
    jobs.finish().run_calls(server)
    ended = server.used_memory
    return {
        "queued_bytes": (queued - before) / num,
        "running_bytes": (running - before) / num,
        "ended_bytes": (ended - before) / num,
    }


def measure_publishing(server: Server, num_steps: int, *, stream: bool) -> dict[str, float]:
    """CPU of the server and of the worker's publisher for 256 sequences with a token each a step.

    Jobs that stream flush every step of 50 ms, the others ten steps together.  Steps follow each
    other without the wait between them, on a clock of their own.
    """
    server.empty()
    epoch = prepare(server.client)
    jobs = JobSet(MAX_PER_CALL)
    jobs.submit().run_calls(server)
    jobs.dispatch(server.client, epoch).run_calls(server)
    clock = _Clock()
    publisher = _open_publisher(server, jobs, clock, stream)
    num_tokens = num_steps * MAX_PER_CALL
    publisher_seconds = 0.0
    with server.metered(num_tokens) as samples:
        for step in range(num_steps):
            updates = [Update(job_id, (20_000 + step,), " word") for job_id in jobs.ids]
            started = time.thread_time()
            publisher.publish(updates)
            if publisher.next_due <= clock.now:
                publisher.flush()
            publisher_seconds += time.thread_time() - started
            clock.now += STEP_SECONDS
    publisher.flush(everything=True)
    if publisher.num_unpublished:
        raise RuntimeError(f"{publisher.num_unpublished} of {num_tokens} tokens were not written")
    server_us = 1e6 * samples[0].cpu_seconds / num_tokens
    publisher_us = 1e6 * publisher_seconds / num_tokens
    step_us = 1e6 * STEP_SECONDS / MAX_PER_CALL
    return {
        "server_us_per_token": server_us,
        "publisher_us_per_token": publisher_us,
        "server_share": server_us / step_us,
        "publisher_share": publisher_us / step_us,
        "share": (server_us + publisher_us) / step_us,
    }


class _Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _open_publisher(server: Server, jobs: JobSet, clock: _Clock, stream: bool) -> Publisher:
    table = JobTable()
    publisher = Publisher(
        server.client,
        KEYS,
        WORKER,
        table,
        Alarm(clock),
        on_lost=_refuse_loss,
        on_room=lambda: None,
        policy=PublishPolicy(),
        clock=clock,
    )
    for job_id in jobs.ids:
        job = Job(JobRef(job_id, QUEUE), 1, stream)
        table.add(job)
        publisher.open(job)
    return publisher


def _refuse_loss(job: Any) -> None:
    raise RuntimeError(f"the server says that {job.job_id} is not ours")


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
