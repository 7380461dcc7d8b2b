"""``tidemill bulk run`` on GSM8K with a five-shot prefix."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import Outcome, sandbox
from support.wait import wait_until
from tidemill import Producer
from tidemill.cli.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "tests" / "data" / "gsm8k_first64.jsonl"
TEMPLATE = ROOT / "examples" / "gsm8k" / "template.txt"


def bulk_args(stack: Stack, out: Path, *extra: str) -> list[str]:
    return [
        *("bulk", "run", str(QUESTIONS), "-o", str(out), "--template", str(TEMPLATE)),
        *("--max-tokens", "32", "--stop", "\nQuestion:", "--redis-url", stack.url),
        *extra,
    ]


@pytest.mark.parametrize("num_questions", [24, pytest.param(64, marks=pytest.mark.slow)])
def test_every_question_is_answered_once_and_the_prefix_is_shared(
    stack: Stack, tmp_path: Path, num_questions: int
) -> None:
    out = tmp_path / "out.jsonl"
    with sandbox(tmp_path) as box:
        args = bulk_args(stack, out, "--limit", str(num_questions))
        done = box.run(*args, timeout_seconds=240)
    assert done.status == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["line"] for row in rows) == list(range(1, num_questions + 1))
    assert all(row["error"] is None for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    # A small model now and then stops at once; hardly ever.
    assert sum(bool(row["text"]) for row in rows) >= 0.9 * num_questions
    assert hit_rate(done) > 60
    # The shared prefix is computed by one job; every other one finds all its full blocks.
    assert sum(row["usage"]["cached_tokens"] == 0 for row in rows) <= 1


def test_a_killed_run_goes_on_where_it_stopped(stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    args = bulk_args(stack, out, "--limit", "12")
    with sandbox(tmp_path) as box:
        command = [sys.executable, "-m", "tidemill.cli.main", *args]
        with subprocess.Popen(command, env=box.environment, stderr=subprocess.PIPE) as first:
            wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3, 120)
            first.send_signal(signal.SIGKILL)
            first.communicate()
        done = box.run(*args, timeout_seconds=240)
    assert done.status == 0, done.stderr
    lines = [json.loads(line)["line"] for line in out.read_text().splitlines()]
    assert sorted(lines) == list(range(1, 13))
    assert int(re.search(r"(\d+) done before", done.stderr)[1]) >= 3  # type: ignore[index]


def test_a_bad_line_fails_alone_and_is_tried_again(stack: Stack, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One, two,"}\n{"prompt": ""}\nnot json\n')
    with sandbox(tmp_path) as box:
        args = ["bulk", "run", str(source), "-o", str(out), "--max-tokens", "4"]
        outcomes = [box.run(*args, "--redis-url", stack.url) for _ in range(2)]
    assert [outcome.status for outcome in outcomes] == [1, 1]
    assert "1 done before" in " ".join(outcomes[1].stderr.split())
    rows = {row["line"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 3 and rows[1]["error"] is None
    assert rows[2]["error"].startswith("prompt: ") and rows[3]["error"].startswith("line: ")


def hit_rate(done: Outcome) -> float:
    found = re.search(r"prefix hit rate ([\d.]+)%", " ".join(done.stderr.split()))
    assert found, done.stderr
    return float(found[1])


def test_a_run_has_a_tenant_terms_and_a_prefix_of_its_own(stack: Stack, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One, two,"}\n{"prompt": "Tick,", "prefix_id": ""}\n')
    options = ["--tenant", "red", "--batch", "counting", "--prefix-id", "p", "--deadline", "200"]
    with sandbox(tmp_path) as box:
        args = ["bulk", "run", str(source), "-o", str(out), "--max-tokens", "2", *options]
        done = box.run(*args, "--redis-url", stack.url)
    assert done.status == 1
    errors = {row["line"]: row["error"] for row in map(json.loads, out.read_text().splitlines())}
    assert errors[1] is None and errors[2].startswith("prefix_id: ")
    with Producer(stack.url, tenant="red") as red:
        batch = red.batch("counting").status()
    assert (batch.total, batch.done) == (1, 1)
