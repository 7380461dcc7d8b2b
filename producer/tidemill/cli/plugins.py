"""Commands that other packages bring along, and words that commands pass on.

The command line imports no other process; a package that has something to offer names it in the
entry point group ``tidemill.commands``, and it is there wherever the package is installed.
"""

import itertools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tidemill.protocol.errors import ConfigError

GROUP = "tidemill.commands"


class CommandGroup(TyperGroup):
    """The commands of this package, and those of others, which are loaded when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *sorted(entry_points(group=GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; raises ``ConfigError`` if its package lacks another."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        for entry_point in entry_points(group=GROUP, name=cmd_name):
            return typer.main.get_command(_load(entry_point))
        return None


def _load(entry_point: EntryPoint) -> typer.Typer:
    try:
        app: typer.Typer = entry_point.load()
    except ImportError as error:
        raise ConfigError(
            f"the command {entry_point.name!r} needs the package {error.name!r}",
            fix='Install it with: pip install "tidemill[all]".',
        ) from error
    return app


class PassingCommand(TyperCommand):
    """A command whose words behind ``--`` are options of another, and which says so if need be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words; raises ``ConfigError`` for an option that this command does not have."""
        own = {
            name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)
        }
        for word in itertools.takewhile(lambda word: word != "--", args):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in own:
                raise ConfigError(
                    f"{ctx.command_path} has no option {name}",
                    fix=f"Options of the worker come behind --: {ctx.command_path} -- {word} ...",
                )
        return list(super().parse_args(ctx, args))
