"""The raw clients, which use redis-py alone, against a real scheduler and workers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.fake_engine import generate
from support.fake_worker_process import fake_worker
from support.scheduler_process import SchedulerProcess, spawn_scheduler, wait_for_leader
from support.wait import wait_until
from tidemill import JobOptions, JobSpec, Producer
from tidemill.protocol.keys import ShardKeys

KEYS = ShardKeys()
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def scheduler(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> Iterator[SchedulerProcess]:
    scheduler = spawn_scheduler(redis_url, tmp_path / "scheduler.log")
    wait_for_leader(redis_client)
    yield scheduler
    scheduler.kill()


@pytest.fixture
def worker(redis_url: str, scheduler: SchedulerProcess) -> Iterator[None]:
    with fake_worker(redis_url):
        yield


def words(prompt: list[int], num_tokens: int) -> str:
    """What the fake model answers."""
    return "".join(f"{token} " for token in generate(prompt, num_tokens))


def start(name: str, *args: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(EXAMPLES / name), *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def produce(redis_url: str, *args: str) -> tuple[int, str, str]:
    with start("raw_producer.py", redis_url, *args) as process:
        stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


class Consuming:
    """A consumer process that is killed and started again."""

    def __init__(self, redis_url: str, output: Path) -> None:
        self._command = [sys.executable, str(EXAMPLES / "raw_consumer.py"), redis_url]
        self._output = output
        self._process = self._start()

    def seen(self) -> list[dict[str, object]]:
        # A killed process may have torn its last line.
        lines = self._output.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def kill_and_restart(self) -> None:
        self.kill()
        with self._output.open("a") as file:
            file.write("\n")
        self._process = self._start()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._output.open("a") as file:
            return subprocess.Popen(self._command, stdout=file)


def test_a_raw_producer_prints_the_answer(redis_url: str, worker: None) -> None:
    status, answer, told = produce(redis_url, "1,2,3", "--ids", "--max-tokens", "40")
    assert (status, answer) == (0, words([1, 2, 3], 40))
    assert told.strip().endswith("done after 40 tokens")


def test_a_raw_producer_gets_its_job_again_by_its_key(redis_url: str, worker: None) -> None:
    args = ["1,2,3", "--ids", "--max-tokens", "9", "--key", "k"]
    first, second = produce(redis_url, *args), produce(redis_url, *args)
    assert first == second
    assert first[1] == words([1, 2, 3], 9)


def test_a_raw_producer_reads_a_result_whose_log_is_gone(
    redis_url: str, redis_client: redis.Redis, worker: None
) -> None:
    args = ["1,2,3", "--ids", "--max-tokens", "9", "--key", "k"]
    first = produce(redis_url, *args)
    [log] = redis_client.scan_iter(match=KEYS.token_log("*"))
    redis_client.delete(log)
    assert produce(redis_url, *args) == first


def test_a_raw_producer_goes_on_over_the_death_of_a_worker(
    redis_url: str, redis_client: redis.Redis, scheduler: SchedulerProcess, tmp_path: Path
) -> None:
    output = tmp_path / "answer.txt"
    command = [sys.executable, str(EXAMPLES / "raw_producer.py"), redis_url, "4,5", "--ids"]
    with output.open("w") as file, fake_worker(redis_url, step_seconds=0.02) as (first, _):
        process = subprocess.Popen([*command, "--max-tokens", "100"], stdout=file)
        wait_until(lambda: len(output.read_text()) > 20, 30, "the first tokens")
        # Messages are lost on the way too.
        listeners = [e for e in redis_client.client_list(_type="pubsub") if not e["name"]]
        assert len(listeners) == 1
        redis_client.client_kill_filter(_id=listeners[0]["id"])
        first.kill()
        with fake_worker(redis_url):
            assert process.wait(60) == 0
    assert output.read_text() == words([4, 5], 100)


def test_a_raw_producer_tells_a_refusal(redis_url: str, worker: None) -> None:
    status, answer, told = produce(redis_url, "1,2", "--ids", "--max-tokens", "1000")
    assert (status, answer) == (1, "")
    assert "refused" in told and "context length is 128" in told


def test_a_raw_consumer_sees_every_ended_job_though_it_is_killed(
    redis_url: str, redis_client: redis.Redis, worker: None, tmp_path: Path
) -> None:
    redis_client.hset(KEYS.settings, "back:*", 100_000)
    stream = KEYS.back_door("default")
    consuming = Consuming(redis_url, tmp_path / "seen.jsonl")
    with Producer(redis_url) as producer:
        prompts = [[1, 2, number] for number in range(300)]
        specs = [JobSpec(prompt, max_tokens=4, batch="b") for prompt in prompts]
        cancelled: JobOptions = {"delay": 60, "batch": "b"}
        specs += [JobSpec([9], **cancelled) for _ in range(20)]
        jobs = producer.submit_many(specs)
        for num_seen in (1, 60, 120, 180):
            wait_until(lambda n=num_seen: len(consuming.seen()) >= n, 60, f"{num_seen} jobs seen")
            consuming.kill_and_restart()
        for job in jobs[300:]:
            job.cancel()
        wait_until(lambda: producer.batch("b").status().unfinished == 0, 60, "the end of all jobs")
        ids = {job.id for job in jobs}
        wait_until(lambda: {row["job"] for row in consuming.seen()} == ids, 60, "all jobs seen")
        wait_until(
            lambda: redis_client.xpending(stream, "results")["pending"] == 0, 10, "all are acked"
        )
        wait_until(
            lambda: redis_client.xinfo_groups(stream)[0]["lag"] == 0, 10, "nothing is left to read"
        )
    consuming.kill()
    rows = {row["job"]: row for row in consuming.seen()}
    for prompt, job in zip(prompts, jobs[:300], strict=True):
        row = rows[job.id]
        assert (row["state"], row["batch"], row["tokens"]) == ("done", "b", 4)
        assert row["text"] == words(prompt, 4)
    assert {(rows[job.id]["state"], rows[job.id]["text"]) for job in jobs[300:]} == {
        ("cancelled", "")
    }


def test_a_raw_consumer_takes_over_what_another_left(
    redis_url: str, redis_client: redis.Redis, worker: None, tmp_path: Path
) -> None:
    redis_client.hset(KEYS.settings, "back:*", 100)
    stream = KEYS.back_door("default")
    with Producer(redis_url) as producer:
        job = producer.submit([1, 2], max_tokens=2)
        job.result(30)
    redis_client.xgroup_create(stream, "results", id="0")
    redis_client.xreadgroup("results", "gone", {stream: ">"})
    [entry] = redis_client.xpending_range(stream, "results", "-", "+", 1)
    redis_client.execute_command(  # type: ignore[no-untyped-call]
        "XCLAIM", stream, "results", "gone", 0, entry["message_id"], "IDLE", 3_600_000
    )
    consuming = Consuming(redis_url, tmp_path / "seen.jsonl")
    wait_until(lambda: [row["job"] for row in consuming.seen()] == [job.id], 30, "the takeover")
    consuming.kill()


@pytest.mark.parametrize("name", ["raw_producer.py", "raw_consumer.py"])
def test_the_examples_explain_themselves_and_need_no_tidemill(name: str) -> None:
    source = (EXAMPLES / name).read_text()
    assert "import tidemill" not in source and "from tidemill" not in source
    with start(name, "--help") as process:
        told = process.communicate(timeout=30)[0]
    assert "XRANGE" in told or "XREADGROUP" in told


@pytest.mark.parametrize(
    ("name", "args"), [("raw_producer.py", ["1,2", "--ids"]), ("raw_consumer.py", [])]
)
@pytest.mark.parametrize(
    ("url", "options", "status", "says"),
    [
        ("foo", [], 2, "Redis URL must specify"),
        ("redis://h:99999", [], 2, "Port out of range"),
        ("{url}", ["--shard", "zz"], 2, "'zz' is not two hex digits"),
        ("{url}", ["--shard", "7f"], 1, "no scheduler has ever run for shard 7f"),
        ("{url}", ["--tenant", "a b"], 2, "'a b' is not 1 to 64 letters"),
        ("{url}", ["--tenant", "x" * 65], 2, "is not 1 to 64 letters"),
    ],
)
def test_a_bad_argument_of_an_example_is_one_line(
    redis_url: str, name: str, args: list[str], url: str, options: list[str], status: int, says: str
) -> None:
    with start(name, url.format(url=redis_url), *args, *options) as process:
        answer, told = process.communicate(timeout=30)
    assert (process.returncode, answer) == (status, "")
    assert says in told.splitlines()[-1]
    assert "Traceback" not in told
