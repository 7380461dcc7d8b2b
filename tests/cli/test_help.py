"""The help of the command line: every command is there by its name and says what it is for."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tidemill.cli.main import app

#: Runs an invocation as a process of its own.
OF_ITS_OWN = {"worker", "scheduler", "gateway"}


def shown(*path: str) -> str:
    told = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0, told.output
    return told.output


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, and every command of a group."""
    root: Any = get_command(app)
    context = root.make_context("tidemill", ["status"])
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        yield (name,), command
        for inner, inner_command in getattr(command, "commands", {}).items():
            yield (name, inner), inner_command


COMMANDS = dict(commands())


def test_the_help_lists_every_command_under_what_it_is_for() -> None:
    told = shown()
    for panel in ("Run", "Ask", "Operate", "Plan"):
        assert f"─ {panel} ─" in told
    listed = {line.split()[1] for line in told.splitlines() if line.startswith("│ ")}
    assert {path[0] for path in COMMANDS if len(path) == 1} <= listed
    assert "─ Commands ─" not in told, "a command without a panel"


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_a_command_says_what_it_is_for_and_what_each_option_means(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert command.help
    for param in command.params:
        assert param.help, param.name


def test_a_flag_does_not_look_as_if_it_took_a_value() -> None:
    for path in (("submit",), ("batch", "output"), ("webhooks", "replay"), ()):
        assert "<bool>" not in shown(*path)
    assert "--detach" in shown("submit")
