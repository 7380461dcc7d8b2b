"""The examples of the SDK as whoever copies them runs them; a mill of a test's answers."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from support.fake_mill import FakeMill, generate
from support.serving import num_jobs, num_open, serving
from support.wait import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.usefixtures("redis_client")


def start(name: str, url: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TIDEMILL_REDIS_URL": url},
    )


def run(name: str, url: str, *args: str) -> str:
    with start(name, url, *args) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quickstart.py", "Amazon: w0 w1"),
        ("rag.py", "4 candidates"),
        ("callbacks.py", "3 of 3 are done"),
        ("asynchronous.py", "Dhaka: w0 w1"),
    ],
)
def test_an_example_runs_to_its_end(redis_url: str, name: str, told: str) -> None:
    with serving(redis_url, generate([1, 1])):
        assert told in run(name, redis_url)


def test_a_dataset_that_is_run_again_finds_its_answers(
    redis_url: str, redis_client: redis.Redis
) -> None:
    with serving(redis_url, generate([1, 1])):
        first = run("datasets.py", redis_url)
        assert run("datasets.py", redis_url) == first
    assert first.startswith("amazon: w0 w1 (job_")
    assert num_jobs(redis_client) == len(re.findall("job_", first)) == 8


def test_a_dataset_that_is_interrupted_goes_on_where_it_was(
    redis_url: str, redis_client: redis.Redis
) -> None:
    mill = FakeMill(redis_client)
    with start("datasets.py", redis_url, "--run", "cut") as process:
        attempt = mill.claim(30)
        wait_until(lambda: num_open(redis_client) == 8)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    generate([1, 1])(attempt)
    with serving(redis_url, generate([1, 1])):
        told = run("datasets.py", redis_url, "--run", "cut")
    assert attempt.job_id in told
    assert num_jobs(redis_client) == 8
