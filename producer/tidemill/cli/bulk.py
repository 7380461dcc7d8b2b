"""``tidemill bulk run``: a file of prompts in, a file of answers out."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.bulk_input import LineReader, count_lines
from tidemill.cli.bulk_output import open_output
from tidemill.cli.bulk_run import BulkRun
from tidemill.cli.connection import open_producer
from tidemill.cli.job_options import (
    Batch,
    Deadline,
    MaxQueue,
    MaxRetries,
    PrefixId,
    StallTimeout,
)
from tidemill.cli.submit import RedisUrl, Tenant
from tidemill.client import Producer
from tidemill.protocol.errors import ConfigError, InvalidRequest, UnknownModel

app = typer.Typer(
    no_args_is_help=True,
    help="""Answer the prompts of a file here, and go on where an earlier run stopped.

`tidemill bulk run in.jsonl -o out.jsonl` works while it runs; `tidemill batch` hands the file over
and lets go.
""",
)

#: How many jobs wait in the queue: enough for the scheduler to find those that share a prefix.
DEFAULT_IN_FLIGHT = 512


@app.callback()
def _group() -> None:
    return None


@app.command("run")
def run(
    input_path: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="One JSON object a line; see above.")
    ],
    output_path: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the answers go.")
    ],
    template: Annotated[
        Path | None,
        typer.Option(help="Text file whose {{name}} places are filled from each line's fields."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the filled template as a chat message.")
    ] = False,
    id_field: Annotated[
        str | None, typer.Option(help="Field that holds the line's id. Default: custom_id or id.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model; overrides the lines' own.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of every line.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable.")] = None,
    priority: Annotated[
        int, typer.Option(help="Lower runs sooner; < 0 interactive, > 0 batch.")
    ] = 1,
    tenant: Tenant = "default",
    prefix_id: PrefixId = None,
    deadline: Deadline = None,
    max_queue: MaxQueue = None,
    stall_timeout: StallTimeout = None,
    max_retries: MaxRetries = None,
    batch: Batch = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Most jobs queued or running at once.")
    ] = DEFAULT_IN_FLIGHT,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many lines.")] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Answer every line of a JSONL file, once, and go on where an earlier run stopped.

    A line is `{"prompt": "..."}`, `{"messages": [...]}`, a request in OpenAI's batch format, or
    any object when `--template` says how to make a prompt of it. Lines may carry sampling
    fields and a `prefix_id` of their own. Failed lines are reported in the output and tried again
    by the next run.
    """
    reader = LineReader(
        template=_read_template(template),
        id_field=id_field,
        model=model,
        defaults={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop": stop or [],
            "priority": priority,
            "prefix_id": prefix_id,
            "deadline": deadline,
            "max_queue": max_queue,
            "stall_timeout": stall_timeout,
            "max_retries": max_retries,
            "batch": batch,
        },
        as_chat=chat,
    )
    total = min(count_lines(input_path), limit or 2**62)
    with (
        open_producer(redis_url, tenant=tenant) as producer,
        open_output(output_path, input_path) as output,
    ):
        reader = replace(reader, run_id=f"{output.run_id}/{_model_id(producer, model)}")
        bulk = BulkRun(producer, reader, output, total, max_in_flight)
        console = Console(stderr=True, highlight=False)
        try:
            bulk.run(input_path)
        except KeyboardInterrupt:
            console.print("Stopped; what is queued still runs. The same command goes on from here.")
            raise
        finally:
            bulk.report(console)
        if not bulk.tally.num_failed:
            output.complete()
    if bulk.tally.num_failed:
        raise typer.Exit(1)


def _model_id(producer: Producer, model: str | None) -> str:
    """Return what tells models, and weights under one name, apart: their answers differ."""
    try:
        card = producer.model(model)
    except UnknownModel:
        raise
    except InvalidRequest:
        return ""  # several are served, and each line names its own
    return f"{card.name}/{card.revision}"


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the template {str(path)!r} cannot be read: {error}",
            fix="--template takes a UTF-8 text file.",
        ) from error
