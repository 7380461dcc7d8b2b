"""``tidemill jobs``: a tenant's jobs, the newest first."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill._reads import JobStatus
from tidemill.cli.connection import open_producer
from tidemill.cli.outline import when
from tidemill.cli.submit import RedisUrl, Tenant
from tidemill.job_list import DEFAULT_PAGE
from tidemill.service.diagnosis.finding import duration


def jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="delayed, queued, run, done, failed, cancelled, expired or dead; repeatable."
        ),
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of it.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="So many.")] = DEFAULT_PAGE,
    tenant: Tenant = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """List jobs, the newest first; lines of batch objects are in their batch's files instead.

    `tidemill jobs --state failed --state dead`
    """
    with open_producer(redis_url, tenant=tenant) as producer:
        found = islice(producer.jobs(state=state, batch=batch), limit)
        if as_json:
            for status in found:
                typer.echo(json.dumps(plain(status)))
        else:
            Console().print(render(found))


def plain(status: JobStatus) -> dict[str, Any]:
    """Return a job as JSON has it."""
    return {**asdict(status), "state": status.state.value}


def render(statuses: Iterator[JobStatus]) -> Table:
    """Return jobs as a table."""
    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    for title in ("id", "state", "model", "submitted", "took", "tokens", "notes"):
        table.add_column(title, overflow="fold", justify="right" if title == "tokens" else "left")
    for status in statuses:
        # Text, not markup: anybody may have written there.
        table.add_row(*map(Text, _row(status)))
    return table


def _row(status: JobStatus) -> tuple[str, ...]:
    submitted = when(status.submitted_ms)[:19].replace("T", " ")
    took = "-"
    if status.ended_ms is not None:
        took = duration(status.ended_ms - status.submitted_ms)
    return (
        status.job_id,
        status.state.value,
        status.model,
        submitted,
        took,
        f"{status.num_tokens:,}",
        ", ".join(_notes(status)),
    )


def _notes(status: JobStatus) -> Iterator[str]:
    if status.batch:
        yield f"batch {status.batch}"
    yield from (f"{name}={value}" for name, value in status.metadata.items())
    if status.error:
        yield status.error
