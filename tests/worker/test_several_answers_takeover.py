"""A worker dies while it answers one prompt several times, and another one goes on."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from support.fake_engine import generate
from support.fake_worker_process import fake_worker
from support.scheduler_process import SchedulerProcess, spawn_scheduler, wait_for_leader
from tidemill import Producer

PROMPT = [1, 2, 3, 4, 5, 6]
NUM_TOKENS = 60
NUM_CHOICES = 4


@pytest.fixture
def scheduler(redis_url: str, tmp_path: Path) -> Iterator[SchedulerProcess]:
    scheduler = spawn_scheduler(redis_url, tmp_path / "scheduler.log")
    yield scheduler
    scheduler.kill()


def expected_text(choice: int) -> str:
    return "".join(f"{token} " for token in generate(PROMPT, NUM_TOKENS, choice=choice))


@pytest.mark.parametrize(
    "crash_at",
    [
        "",
        pytest.param("worker.before_append", marks=pytest.mark.slow),
        pytest.param("worker.after_append", marks=pytest.mark.slow),
    ],
)
def test_a_reader_sees_every_choice_once_whoever_generates_it(
    redis_client: redis.Redis, redis_url: str, scheduler: SchedulerProcess, crash_at: str
) -> None:
    wait_for_leader(redis_client)
    texts = [""] * NUM_CHOICES
    ids: list[list[int]] = [[] for _ in texts]
    with ExitStack() as stack:
        victim, _ = stack.enter_context(fake_worker(redis_url, crash_at, step_seconds=0.05))
        producer = stack.enter_context(Producer(redis_url))
        job = producer.submit(
            PROMPT, model="m", n=NUM_CHOICES, max_tokens=NUM_TOKENS, ignore_eos=True, seed=3
        )
        if crash_at:
            victim.wait(60)
            stack.enter_context(fake_worker(redis_url))
        position = 0
        with job.stream(timeout=60) as stream:
            for chunk in stream:
                assert chunk.start == position
                position = chunk.end
                ids[chunk.choice] += chunk.ids
                texts[chunk.choice] += chunk.text
                if victim.poll() is None and position > 5 * NUM_CHOICES:
                    victim.kill()
                    victim.wait(60)
                    stack.enter_context(fake_worker(redis_url))
        again = list(job.stream(timeout=60))
        result = job.result(timeout=60)
    assert ids == [generate(PROMPT, NUM_TOKENS, choice=choice) for choice in range(NUM_CHOICES)]
    assert texts == [expected_text(choice) for choice in range(NUM_CHOICES)]
    assert [choice.text for choice in result.choices] == texts
    assert [
        "".join(chunk.text for chunk in again if chunk.choice == choice)
        for choice in range(NUM_CHOICES)
    ] == texts
    assert result.usage.completion_tokens == NUM_CHOICES * NUM_TOKENS
    assert int(redis_client.hget(f"tm:{{00}}:j:{job.id}", "at") or 0) == 2
