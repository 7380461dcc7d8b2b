"""The one-job commands against a running Tidemill."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import heed_interrupts, sandbox
from support.wait import wait_until
from tidemill import JobState, Producer
from tidemill.cli.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]


#: The model goes on with this for long.
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"


def test_submit_streams_the_answer_of_the_model(stack: Stack, tmp_path: Path) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        args = ("--max-tokens", "16", "--temperature", "0")
        outcome = box.run("submit", "What is the capital of France?", *args)
        piped = box.run("submit", "-", *args, stdin="What is the capital of France?")
    assert (outcome.status, piped.status) == (0, 0)
    assert "Paris" in outcome.stdout
    assert piped.stdout == outcome.stdout


def test_submit_and_follow_print_a_result_as_json(stack: Stack, tmp_path: Path) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        args = ("--max-tokens", "5", "--temperature", "0", "--json")
        submitted = box.run("submit", "--raw", "One, two,", *args)
        result = json.loads(submitted.stdout)
        followed = box.run("follow", result["job_id"], "--json")
    assert result["state"] == "done" and result["usage"]["completion_tokens"] == 5
    assert len(result["token_ids"]) == 5
    assert json.loads(followed.stdout) == result


def test_a_detached_job_is_followed_cancelled_and_its_partial_output_printed(
    stack: Stack, producer: Producer, tmp_path: Path
) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        job_id = box.run(
            "submit", "--raw", COUNTING, "--detach", "--max-tokens", "1500", "--temperature", "0"
        ).stdout.strip()
        wait_until(lambda: producer.job_status(job_id).num_tokens > 5, 60)
        assert box.run("cancel", job_id).stdout.strip() == "cancelled"
        as_text, as_json = box.run("follow", job_id), box.run("follow", job_id, "--json")
    assert as_text.status == as_json.status == 1
    assert job_id in as_text.error and as_text.stdout.endswith("\n")
    partial = json.loads(as_json.stdout)
    assert partial["state"] == "cancelled" and len(partial["token_ids"]) > 5


def test_ctrl_c_cancels_the_job_that_submit_waits_for(
    stack: Stack, producer: Producer, tmp_path: Path
) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        command = [sys.executable, "-m", "tidemill.cli.main", "submit", "--raw", COUNTING]
        args = [
            "--max-tokens",
            "1500",
            "--temperature",
            "0",
            "--idempotency-key",
            f"key-{tmp_path}",
        ]
        with subprocess.Popen(
            [*command, *args],
            env=box.environment,
            stdout=subprocess.PIPE,
            preexec_fn=heed_interrupts,
        ) as waiting:
            assert waiting.stdout is not None and waiting.stdout.read(1)
            waiting.send_signal(signal.SIGINT)
            waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    same = producer.submit(
        COUNTING, max_tokens=1500, temperature=0, idempotency_key=f"key-{tmp_path}"
    )
    assert same.status().state is JobState.CANCELLED


def test_status_shows_the_worker_as_tables_and_as_json(stack: Stack, tmp_path: Path) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        tables, as_json = box.run("status"), box.run("status", "--json")
    assert tables.status == as_json.status == 0
    assert all(title in tables.stdout for title in ("Jobs", "Workers", "Models"))
    snapshot = json.loads(as_json.stdout)
    assert [w["info"]["model"] for w in snapshot["workers"]] == ["smollm2-135m-instruct"]
    assert snapshot["scheduler_id"]
