"""``tidemill demo``, as a stranger runs it."""

from pathlib import Path

import pytest

from support.processes import sandbox

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]

#: Of the answers, and of the table of figures.
SHOWN = ("capital of France", "Paris", "first token", "tokens/s", "% hit")


@pytest.mark.slow  # the demo with a killed worker shows all of it, and more
def test_the_demo_answers_a_dozen_prompts_and_shows_a_table(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    with sandbox(tmp_path) as box:
        done = box.run("demo", "--max-tokens", "24", timeout_seconds=150)
    assert done.status == 0, done.stderr
    assert all(text in done.stdout for text in SHOWN)
    assert "12 streams, 0 with" in done.stdout


def test_killing_the_worker_leaves_the_demos_streams_whole(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    with sandbox(tmp_path) as box:
        done = box.run("demo", "--max-tokens", "40", "--kill-worker", timeout_seconds=150)
    assert done.status == 0, done.stderr
    assert all(text in done.stdout for text in SHOWN)
    shown = " ".join(done.stdout.split())
    assert "was killed after" in shown
    assert "12 streams went on without a gap or a repeated token" in shown
