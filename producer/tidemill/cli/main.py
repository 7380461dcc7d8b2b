"""The command line's entry point: the commands, and how their errors are told."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from tidemill._version import __version__
from tidemill.cli import (
    batches,
    bulk,
    cancel,
    demo,
    dlq,
    doctor,
    gateway,
    jobs,
    keys,
    kinds,
    kv,
    lora,
    processes,
    status,
    submit,
    tenant,
    up,
)
from tidemill.cli.plugins import CommandGroup, PassingCommand
from tidemill.protocol.errors import Overloaded, TidemillError

app = typer.Typer(
    name="tidemill",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Asynchronous LLM inference over a message queue.

First steps: `tidemill demo` answers prompts with a small real model.
`tidemill up` starts broker, scheduler, workers and an OpenAI-compatible HTTP server;
then, from another terminal, `tidemill submit "Why is the sky blue?"`
or `tidemill bulk run in.jsonl -o out.jsonl`. If something does not work: `tidemill doctor`.

Each command explains itself: `tidemill COMMAND --help`.
""",
)
app.command("up", cls=PassingCommand, rich_help_panel="Run")(up.up)
app.command("worker", context_settings=processes.PASS_ON, rich_help_panel="Run")(processes.worker)
app.command("scheduler", context_settings=processes.PASS_ON, rich_help_panel="Run")(
    processes.scheduler
)
app.command("gateway", context_settings=processes.PASS_ON, rich_help_panel="Run")(gateway.gateway)
app.command("demo", rich_help_panel="Run")(demo.demo)
app.command("submit", rich_help_panel="Ask")(submit.submit)
app.command("follow", rich_help_panel="Ask")(submit.follow)
app.command("embed", rich_help_panel="Ask")(kinds.embed)
app.command("score", rich_help_panel="Ask")(kinds.score)
app.command("transcribe", rich_help_panel="Ask")(kinds.transcribe)
app.command("jobs", rich_help_panel="Ask")(jobs.jobs)
app.command("cancel", rich_help_panel="Ask")(cancel.cancel)
app.command("status", rich_help_panel="Operate")(status.status)
app.command("kv", rich_help_panel="Operate")(kv.kv)
app.command("lora", rich_help_panel="Operate")(lora.lora)
app.command("doctor", rich_help_panel="Operate")(doctor.doctor)
app.add_typer(batches.app, name="batch", rich_help_panel="Ask")
app.add_typer(bulk.app, name="bulk", rich_help_panel="Ask")
app.add_typer(dlq.app, name="dlq", rich_help_panel="Operate")
app.add_typer(keys.app, name="keys", rich_help_panel="Operate")
app.add_typer(tenant.app, name="tenant", rich_help_panel="Operate")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemill {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            metavar="",
            help="Print the version.",
        ),
    ] = False,
) -> None:
    return None


def main() -> None:
    """Run the command; an error of ours is one line on standard error and exit status 1."""
    try:
        app()
    except TidemillError as error:
        # soft_wrap: one line stays one line, whatever the terminal's width.
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        console.print(f"error: {error.one_line()}{_when_again(error)}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _when_again(error: TidemillError) -> str:
    if not isinstance(error, Overloaded):
        return ""
    return f". Try again in {error.retry_after_seconds:.1f} s."


if __name__ == "__main__":
    main()
