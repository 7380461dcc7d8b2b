"""``tidemill batch``: files of OpenAI's batch format, worked off by the server."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from tidemill._endpoint import find_endpoint
from tidemill.batches.client import AsyncBatches
from tidemill.cli.connection import meet
from tidemill.cli.job_options import CallbackUrl, Metadata, parse_metadata
from tidemill.cli.submit import RedisUrl, Tenant
from tidemill.protocol.batches import ENDPOINTS, Batch, BatchState
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.files import Purpose

app = typer.Typer(
    no_args_is_help=True,
    help="""Batches: many requests in one file, answered whenever there is room.

`tidemill batch submit in.jsonl --wait` and then `tidemill batch output ID -o out.jsonl`. A line is
`{"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, as in
OpenAI's API. The server works on, whatever becomes of this command.
""",
)

_POLL_SECONDS = 0.5
_PIECE_BYTES = 1 << 18

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="Its id, such as batch_01...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as OpenAI's API tells it.")]

T = TypeVar("T")


@app.command("submit")
def submit(
    path: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="The requests.")],
    endpoint: Annotated[
        str | None, typer.Option(help="Such as /v1/embeddings. Default: the url of the first line.")
    ] = None,
    window: Annotated[str, typer.Option(help="Time for all of it: 90m, 24h, 7d.")] = "24h",
    metadata: Metadata = None,
    callback_url: CallbackUrl = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow it to its end.")] = False,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Send a file of requests and print the id of its batch."""

    async def work(client: AsyncBatches) -> Batch:
        with _open(path) as source:
            named = endpoint or _first_url(source)
            file = await client.create_file(
                _pieces(source), filename=path.name, purpose=Purpose.BATCH
            )
        batch = await client.create_batch(
            input_file_id=file.file_id,
            endpoint=named,
            completion_window=window,
            metadata=parse_metadata(metadata),
            callback_url=callback_url,
        )
        typer.echo(batch.batch_id)
        return await _follow(client, batch.batch_id) if wait else batch

    batch = _run(work, tenant, redis_url)
    if wait:
        _end(batch)


@app.command("status")
def status(
    batch_id: BatchId,
    as_json: AsJson = False,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Show how far a batch is, and what is wrong with its input."""
    batch = _run(lambda client: client.batch(batch_id), tenant, redis_url)
    if as_json:
        typer.echo(json.dumps(batch.plain()))
        return
    _tell(batch)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, help="The newest so many.")] = 20,
    as_json: AsJson = False,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """List the batches of a tenant, the newest first."""
    page = _run(lambda client: client.batches(limit=limit), tenant, redis_url)
    if as_json:
        typer.echo(json.dumps(page.plain()))
        return
    table = Table(box=box.SIMPLE, padding=0)
    for title in ("batch", "state", "answered", "failed", "total", "created", "endpoint"):
        table.add_column(title)
    for batch in page.items:
        counts = (batch.num_answered, batch.num_failed, batch.total)
        row = (batch.batch_id, str(batch.state), *(f"{n:,}" for n in counts))
        table.add_row(*map(Text, (*row, _time(batch.created_ms), batch.endpoint)))
    Console().print(table)


@app.command("cancel")
def cancel(batch_id: BatchId, tenant: Tenant = "default", redis_url: RedisUrl = None) -> None:
    """End a batch early; what was answered is kept."""
    batch = _run(lambda client: client.cancel_batch(batch_id), tenant, redis_url)
    typer.echo(str(batch.state))


@app.command("wait")
def wait(batch_id: BatchId, tenant: Tenant = "default", redis_url: RedisUrl = None) -> None:
    """Follow a batch to its end; exit status 1 unless it is completed."""
    _end(_run(lambda client: _follow(client, batch_id), tenant, redis_url))


@app.command("output")
def output(
    batch_id: BatchId,
    path: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where it goes. Default: here.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The failed lines instead.")] = False,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Fetch the answers of a batch that has ended, or its failed lines."""

    async def work(client: AsyncBatches) -> None:
        batch = await client.batch(batch_id)
        if not batch.state.is_terminal:
            raise ConfigError(
                f"the batch {batch_id} is {batch.state}",
                fix=f"Wait for its end: tidemill batch wait {batch_id}",
            )
        file_id = batch.plain()["error_file_id" if errors else "output_file_id"]
        if file_id is not None:
            _, content = await client.content(file_id)
            await _write(content, path)

    _run(work, tenant, redis_url)


def _run(work: Callable[[AsyncBatches], Awaitable[T]], tenant: str, redis_url: str | None) -> T:
    endpoint = find_endpoint(redis_url, tenant, None)
    meet(endpoint)

    async def connected() -> T:
        async with AsyncBatches(endpoint.url, tenant=tenant) as client:
            return await work(client)

    return asyncio.run(connected())


async def _follow(client: AsyncBatches, batch_id: str) -> Batch:
    """Show a bar until the batch has ended."""
    batch = await client.batch(batch_id)
    with _progress() as progress:
        task = progress.add_task("batch", total=None, state="", failed=0)
        while True:
            progress.update(
                task,
                completed=batch.num_answered + batch.num_failed,
                total=batch.total or None,
                state=str(batch.state),
                failed=batch.num_failed,
            )
            if batch.state.is_terminal:
                return batch
            await asyncio.sleep(_POLL_SECONDS)
            batch = await client.batch(batch_id)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.fields[state]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("failed {task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _end(batch: Batch) -> None:
    _tell(batch)
    if batch.state is not BatchState.COMPLETED:
        raise typer.Exit(1)


def _tell(batch: Batch) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    usage = batch.usage
    console.print(
        f"{batch.batch_id} {batch.state}: {batch.num_answered:,} answered,"
        f" {batch.num_failed:,} failed of {batch.total:,}; {usage.input_tokens:,} input and"
        f" {usage.output_tokens:,} output tokens; expires {_time(batch.expires_ms)}"
    )
    for error in batch.errors:
        where = "" if error["line"] is None else f"line {error['line']}: "
        console.print(f"  {where}{error['code']}: {error['message']}")


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _first_url(source: BinaryIO) -> str:
    line = source.readline(1 << 20)
    source.seek(0)
    try:
        found: Any = json.loads(line)
        return str(found["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the first line names no url",
            fix=f"Name the endpoint of all lines with --endpoint: {', '.join(ENDPOINTS)}.",
        ) from error


async def _pieces(source: BinaryIO) -> AsyncIterator[bytes]:
    while data := source.read(_PIECE_BYTES):
        yield data


async def _write(content: AsyncIterator[bytes], path: Path | None) -> None:
    target = sys.stdout.buffer if path is None else path.open("wb")
    try:
        async for data in content:
            target.write(data)
        target.flush()
    finally:
        if path is not None:
            target.close()
