"""A seeded job gives the same tokens alone, in company, and after its worker was killed."""

import os
import signal
from typing import Any

import pytest

from support.wait import wait_until
from tidemill import JobState, Producer
from tidemill.cli.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]

PROMPT = "Once upon a time, in a village by the sea,"
SETTINGS: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 200,
    "seed": 1234,
    "max_tokens": 24,
}
#: So many tokens that a killer who is late still finds the job running.
LONG = SETTINGS | {"max_tokens": 64, "ignore_eos": True}
#: So few that other tokens can hardly be missed among them.
SHORT = SETTINGS | {"max_tokens": 10}


def sampled(producer: Producer, settings: dict[str, Any] = SETTINGS) -> tuple[int, ...]:
    return producer.submit(PROMPT, **settings).result(90).token_ids


def test_a_seeded_job_gives_the_same_tokens_alone_and_in_a_batch_of_16(producer: Producer) -> None:
    alone = sampled(producer)
    others = [
        producer.submit(
            f"Number {n}: tell me more.", temperature=1.0, seed=n, max_tokens=1000, ignore_eos=True
        )
        for n in range(15)
    ]
    wait_until(lambda: all(job.status().num_tokens for job in others), 60, "15 jobs run")
    in_company = sampled(producer)
    assert [job.cancel() for job in others] == [JobState.CANCELLED] * 15, "they ran all the time"
    assert in_company == alone
    assert len(set(alone)) > 10


def test_another_seed_gives_other_tokens(producer: Producer) -> None:
    assert sampled(producer, SHORT) != sampled(producer, SHORT | {"seed": 99})


def test_a_seeded_job_gives_the_same_tokens_after_its_worker_was_killed(
    stack: Stack, producer: Producer
) -> None:
    undisturbed = sampled(producer, LONG)
    [pid] = stack.pids("worker")
    job = producer.submit(PROMPT, **LONG)
    ids: list[int] = []
    for chunk in job.stream(timeout=90):
        if not ids:
            os.kill(pid, signal.SIGKILL)
        assert chunk.start == len(ids)
        ids += chunk.ids
    wait_until(lambda: stack.pids("worker") not in ([], [pid]), 60, "the worker is back")
    assert tuple(ids) == undisturbed
    assert job.status().attempts > 1
