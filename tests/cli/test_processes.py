"""The commands that turn into one process of a deployment."""

import sys
from pathlib import Path

import pytest
import typer

from support.processes import sandbox
from tidemill.cli import processes
from tidemill.protocol.errors import ConfigError


@pytest.mark.parametrize(("command", "option"), [("worker", "--model"), ("scheduler", "--policy")])
def test_help_is_that_of_the_process(command: str, option: str, tmp_path: Path) -> None:
    with sandbox(tmp_path) as box:
        outcome = box.run(command, "--help")
    assert outcome.status == 0
    assert f"usage: tidemill {command}" in outcome.stdout and option in outcome.stdout


def test_a_wrong_option_is_told_by_the_process_in_one_line(tmp_path: Path) -> None:
    with sandbox(tmp_path) as box:
        outcome = box.run("worker", "--model", "/nowhere", "--max-num-seqs", "0")
    assert outcome.status != 0
    assert outcome.error.startswith("error: ") and "--max-num-seqs" in outcome.error
    assert len(outcome.error.splitlines()) == 1


def test_a_process_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tidemill_gpuworker is not installed") as failure:
        processes.worker(typer.Context(typer.main.get_command(_app()), info_name="worker"))
    assert "tidemill[worker]" in failure.value.one_line()


def test_the_process_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(processes.os, "execv", lambda path, argv: called.append((path, argv)))
    context = typer.Context(typer.main.get_command(_app()), info_name="scheduler")
    context.args = ["--policy", "fifo"]
    processes.scheduler(context)
    argv = [sys.executable, "-m", "tidemill_scheduler", "--policy", "fifo"]
    assert called == [(sys.executable, argv)]


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command(context_settings=processes.PASS_ON)(processes.worker)
    return app
