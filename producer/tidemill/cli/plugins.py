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


#: Where the help shows commands of other packages.
_PANELS = {"webhooks": "Operate", "simulate": "Plan", "calibrate": "Plan"}


class CommandGroup(TyperGroup):
    """The commands of this package, and those of others, which are loaded when they are used."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option for help, which takes no value."""
        return _as_flag(super().get_help_option(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *sorted(entry_points(group=GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; raises ``ConfigError`` if its package lacks another."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is None:
            command = _brought_along(cmd_name)
        if command is not None:
            _show_flags(ctx, command)
        return command


def _brought_along(name: str) -> Any:
    for entry_point in entry_points(group=GROUP, name=name):
        command: Any = typer.main.get_command(_load(entry_point))
        # A group of commands does not know its name.
        command.name, command.rich_help_panel = name, _PANELS.get(name)
        return command
    return None


def _show_flags(ctx: Any, command: Any) -> None:
    # Typer shows the type of a flag, as if it took a value.
    for param in (*command.params, command.get_help_option(ctx)):
        _as_flag(param)
    for inner in getattr(command, "commands", {}).values():
        _show_flags(ctx, inner)


def _as_flag(param: Any) -> Any:
    if getattr(param, "is_bool_flag", False) and param.metavar is None:
        param.metavar = ""
    return param


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
