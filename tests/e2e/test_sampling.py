"""A seeded job gives the same tokens alone, in company, and after its worker was killed."""

import os
import signal

import pytest

from support.wait import wait_until
from tidemill import JobState, Producer
from tidemill.cli.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]

PROMPT = "Once upon a time, in a village by the sea,"
SETTINGS = {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "seed": 1234, "max_tokens": 48}


def sampled(producer: Producer) -> tuple[int, ...]:
    return producer.submit(PROMPT, **SETTINGS).result(60).token_ids  # type: ignore[arg-type]


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
    first = producer.submit(PROMPT, **SETTINGS).result(60)  # type: ignore[arg-type]
    other = producer.submit(PROMPT, **{**SETTINGS, "seed": 99}).result(60)  # type: ignore[arg-type]
    assert first.token_ids != other.token_ids


def test_a_seeded_job_gives_the_same_tokens_after_its_worker_was_killed(
    stack: Stack, producer: Producer
) -> None:
    undisturbed = sampled(producer)
    [pid] = stack.pids("worker")
    job = producer.submit(PROMPT, **SETTINGS)  # type: ignore[arg-type]
    ids: list[int] = []
    for chunk in job.stream(timeout=90):
        if not ids:
            os.kill(pid, signal.SIGKILL)
        assert chunk.start == len(ids)
        ids += chunk.ids
    wait_until(lambda: stack.pids("worker") not in ([], [pid]), 60, "the worker is back")
    assert tuple(ids) == undisturbed
    assert job.status().attempts > 1
