"""What a server lost comes back with its real scheduler and workers, token by token."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from support.fake_engine import generate
from support.fake_worker_process import fake_worker
from support.lossy_broker import LossyBroker
from support.scheduler_process import spawn_scheduler, wait_for_leader
from support.wait import wait_until
from tidemill import Chunk, Job, Producer
from tidemill.service.redis import connect

_NUM_TOKENS = 40
_NUM_JOBS = 40


def prompt(number: int) -> list[int]:
    return [1, 2, number]


def wait_for_worker(producer: Producer) -> None:
    wait_until(lambda: producer.status().workers, 30, "a worker")


@pytest.mark.parametrize("loss", ["tail", "everything"])
def test_every_job_ends_right_although_the_server_lost_it(tmp_path: Path, loss: str) -> None:
    with (
        LossyBroker(tmp_path / "broker") as broker,
        connect(broker.url, retries=20) as client,
        Producer(broker.url, timeout=40) as producer,
    ):
        scheduler = spawn_scheduler(broker.url, tmp_path / "scheduler.log")
        try:
            wait_for_leader(client)
            with fake_worker(broker.url, step_seconds=0.02):
                wait_for_worker(producer)
                _lose_and_check(broker, client, producer, loss)
        finally:
            scheduler.kill()


def _lose_and_check(
    broker: LossyBroker, client: redis.Redis, producer: Producer, loss: str
) -> None:
    jobs = _submit(producer, range(_NUM_JOBS // 2))
    streams = [job.stream() for job in jobs[:5]]
    chunks: list[list[Chunk]] = [[next(stream)] for stream in streams]
    mark = broker.mark()
    jobs += _submit(producer, range(_NUM_JOBS // 2, _NUM_JOBS))
    chunks[0].append(next(streams[0]))
    if loss == "tail":
        broker.lose_after(mark)
    else:
        broker.lose_everything()
    expected = [generate(prompt(number), _NUM_TOKENS) for number in range(_NUM_JOBS)]
    for stream, told, tokens in zip(streams, chunks, expected, strict=False):
        told += stream
        assert [token for chunk in told for token in chunk.ids] == tokens
    # Only a job that is asked about is brought back: one after the other would take long.
    with ThreadPoolExecutor(_NUM_JOBS) as pool:
        results = pool.map(lambda job: job.result(60), jobs)
        assert [list(result.token_ids) for result in results] == expected


def _submit(producer: Producer, numbers: range) -> list[Job]:
    made = producer.submit_many([prompt(n) for n in numbers], max_tokens=_NUM_TOKENS)
    return [job for job in made if isinstance(job, Job)]
