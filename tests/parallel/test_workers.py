"""Whole workers of two ranks: drained, and with a rank killed while a job runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from support import shard
from support.golden_models import make_golden_model, save_golden_model
from support.shard import KEYS
from support.tiny_tokenizers import byte_level_tokenizer
from support.wait import wait_until
from support.worker_rig import result_of, state_of, submit
from tidemill.protocol.messages import GenerateRequest
from tidemill.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

NUM_TOKENS = 400


@pytest.fixture
def epoch(redis_client: redis.Redis) -> int:
    """The test leads the shard."""
    return shard.lead(redis_client)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    byte_level_tokenizer().raw.save(str(directory / "tokenizer.json"))
    return save_golden_model(make_golden_model("llama untied"), directory)


@contextmanager
def worker(url: str, model_dir: Path, num_ranks: int) -> Iterator[tuple[psutil.Popen, str]]:
    """A worker process that serves ``tiny``, and its id."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "tidemill_gpuworker", "--redis-url", url]
    command += ["--model", str(model_dir), "--served-model-name", "tiny", "--num-threads", "1"]
    command += ["--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "64"]
    command += ["--tensor-parallel-size", str(num_ranks), "--ready-fd", str(write_end)]
    process = psutil.Popen(command, pass_fds=(write_end,), stderr=subprocess.PIPE)
    os.close(write_end)
    try:
        with os.fdopen(read_end) as ready:
            yield process, ready.readline().strip()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def give(client: redis.Redis, epoch: int, job_id: str, worker_id: str) -> None:
    assert shard.dispatch(client, job_id, epoch, worker=worker_id, lease_ms=60_000).fence > 0


def new_job(client: redis.Redis) -> str:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerateRequest(model="tiny", prompt_ids=tuple(range(10, 50)), params=params)
    return submit(client, request)


def wait_for_tokens(client: redis.Redis, job_id: str, count: int) -> None:
    wait_until(
        lambda: int(client.hget(KEYS.job(job_id), "n") or 0) >= count,
        what=f"{job_id} has {count} tokens",
        timeout=60,
    )


def test_the_jobs_of_a_worker_whose_rank_is_killed_finish_elsewhere(
    redis_client: redis.Redis, redis_url: str, epoch: int, model_dir: Path
) -> None:
    client = redis_client
    job_id, twin = new_job(client), new_job(client)
    with worker(redis_url, model_dir, 2) as (process, worker_id):
        give(client, epoch, job_id, worker_id)
        wait_for_tokens(client, job_id, 20)
        (rank,) = process.children()

        rank.kill()

        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
        assert log.decode().splitlines()[-1].startswith("error: ")
        assert b"rank 1" in log
        assert not rank.is_running()
    assert state_of(client, job_id) == "queued"
    taken_over = int(client.hget(KEYS.job(job_id), "n") or 0)
    assert 20 <= taken_over < NUM_TOKENS

    with worker(redis_url, model_dir, 1) as (_, other_id):
        for each in (job_id, twin):
            give(client, epoch, each, other_id)
            wait_until(
                lambda each=each: state_of(client, each) == "done",
                what="the job has ended",
                timeout=60,
            )
    assert result_of(client, job_id).ids == result_of(client, twin).ids


# The job of the killed worker is still open.
@pytest.mark.leaks_keys
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_worker(
    number: int, redis_client: redis.Redis, redis_url: str, epoch: int, model_dir: Path
) -> None:
    client, job_id = redis_client, new_job(redis_client)
    with worker(redis_url, model_dir, 2) as (process, worker_id):
        give(client, epoch, job_id, worker_id)
        wait_for_tokens(client, job_id, 20)
        (rank,) = process.children()
        if number == signal.SIGKILL:
            # One that was stopped does not even see that its channel closes.
            rank.suspend()
        else:
            # As a supervisor does that ends a whole group: the drain needs all ranks.
            rank.send_signal(number)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (0 if number == signal.SIGTERM else -number)
        wait_until(lambda: not rank.is_running(), what="the rank is gone")
    if number == signal.SIGTERM:
        assert state_of(client, job_id) == "done"
        assert len(result_of(client, job_id).ids) == NUM_TOKENS
