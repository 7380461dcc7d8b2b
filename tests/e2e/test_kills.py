"""kill -9 of everything while 200 jobs run: each ends once, each stream is whole."""

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import redis

from e2e.conftest import stack_options
from support.leaks import find_leaks
from support.shard import read_log
from support.wait import wait_until, wait_until_async
from tidemill import AsyncProducer, BrokerUnavailable, Chunk
from tidemill.cli.stack import Stack
from tidemill.cli.up import echo
from tidemill.protocol.keys import keys_of
from tidemill.service.redis import connect

pytestmark = [pytest.mark.model, pytest.mark.timeout(280)]

NUM_JOBS = 200
PROMPTS = [f"{word} is the thing that" for word in ("Water", "Iron", "Bread", "Light", "Time")]
MAX_TOKENS = 8


@dataclass
class Followed:
    """One job as its live reader saw it."""

    prompt: str
    job_id: str
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.ids)

    @property
    def is_whole(self) -> bool:
        ends = [0, *(chunk.end for chunk in self.chunks)]
        return [chunk.start for chunk in self.chunks] == ends[:-1]


async def submit(producer: AsyncProducer, number: int) -> Followed:
    """Submit one job, trying again with the same key while the broker is away."""
    prompt = PROMPTS[number % len(PROMPTS)]
    while True:
        try:
            job = await producer.submit(
                prompt,
                max_tokens=MAX_TOKENS,
                temperature=0,
                ignore_eos=True,
                idempotency_key=f"job-{number}",
            )
            return Followed(prompt, job.id)
        except BrokerUnavailable:
            continue


async def follow(producer: AsyncProducer, followed: Followed) -> None:
    """Read a stream to its end, going on after the last chunk whenever the broker was away."""
    while True:
        after = followed.chunks[-1].event_id if followed.chunks else 0
        try:
            async for chunk in producer.stream(followed.job_id, after=after):
                followed.chunks.append(chunk)
            return
        except BrokerUnavailable:
            continue


async def kill_all_kinds(stack: Stack, jobs: list[Followed], rng: random.Random) -> list[str]:
    """Kill each kind of process twice, each time after some more tokens were streamed."""
    victims = ["worker", "broker", "scheduler"] * 2
    rng.shuffle(victims)
    for kill_number, kind in enumerate(victims, start=1):
        goal = kill_number * NUM_JOBS * MAX_TOKENS // (len(victims) + 2)
        await wait_until_async(partial(_has_streamed, jobs, goal), 150, "streams stand still")
        pids = await wait_until_async(partial(stack.pids, kind), 60, f"no {kind}")
        os.kill(rng.choice(pids), signal.SIGKILL)
    return victims


def _has_streamed(jobs: list[Followed], goal: int) -> bool:
    return sum(job.chunks[-1].end for job in jobs if job.chunks) >= goal


async def run_jobs(stack: Stack) -> tuple[list[Followed], list[str]]:
    """Submit and follow all jobs while the killer is at work."""
    async with AsyncProducer(stack.url, timeout=60) as producer:
        jobs = list(await asyncio.gather(*(submit(producer, n) for n in range(NUM_JOBS))))
        killer = asyncio.create_task(kill_all_kinds(stack, jobs, random.Random(7)))
        await asyncio.gather(*(follow(producer, job) for job in jobs))
        return jobs, await killer


def test_every_job_ends_once_and_every_stream_is_whole_when_everything_is_killed(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    options = stack_options(demo_model_dir, tmp_path, workers=2)
    with Stack(options, sink=echo) as stack:
        jobs, victims = asyncio.run(run_jobs(stack))
        with connect(stack.url) as client:
            check_jobs(client, jobs)
            wait_until(lambda: not find_leaks(client), 30, "something is left of ended jobs")
    assert Counter(victims) == {"worker": 2, "broker": 2, "scheduler": 2}


def check_jobs(client: redis.Redis, jobs: list[Followed]) -> None:
    """Each job has one terminal entry, and its reader saw exactly the log."""
    answers: dict[str, tuple[int, ...]] = {}
    for job in jobs:
        log = read_log(client, job.job_id)
        assert log.terminals == ["done"]
        assert job.is_whole
        assert tuple(log.ids) == job.ids
        assert len(job.ids) == MAX_TOKENS
        # Greedy in float32: jobs with the same prompt agree, however often they were interrupted.
        assert answers.setdefault(job.prompt, job.ids) == job.ids
        assert client.hget(keys_of(job.job_id).job(job.job_id), "st") == b"done"
    assert len({job.job_id for job in jobs}) == NUM_JOBS
