"""``tidemill status``: what waits, what runs, who works."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.table import Table

from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.status import Status, WorkerSnapshot


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show queues, workers, models and the leading scheduler."""
    with open_producer(redis_url, shard=shard) as producer:
        snapshot = producer.status()
    if as_json:
        typer.echo(json.dumps(asdict(snapshot), default=_plain))
    else:
        Console().print(render(snapshot))


def render(snapshot: Status) -> RenderableType:
    """Return the snapshot as tables."""
    return Group(_totals(snapshot), _workers(snapshot), _models(snapshot))


def _totals(snapshot: Status) -> Table:
    table = Table(title="Jobs", title_justify="left")
    for name in ("tenant", "queued", "running"):
        table.add_column(name, justify="left" if name == "tenant" else "right")
    tenants = sorted({*snapshot.queued_by_tenant, *snapshot.running_by_tenant})
    for tenant in tenants:
        queued = snapshot.queued_by_tenant.get(tenant, 0)
        running = snapshot.running_by_tenant.get(tenant, 0)
        table.add_row(tenant, str(queued), str(running))
    table.add_section()
    table.add_row("all", str(snapshot.num_queued), str(snapshot.num_running))
    leader = snapshot.scheduler_id or "[red]none: nothing is dispatched[/]"
    table.caption = (
        f"scheduler {leader}, epoch {snapshot.scheduler_epoch};"
        f" dead letters: {snapshot.num_dead_letters}"
    )
    return table


def _workers(snapshot: Status) -> Table:
    table = Table(title="Workers", title_justify="left")
    table.add_column("worker")
    table.add_column("model")
    for name in ("running", "waiting", "KV blocks used", "cache hits", "step"):
        table.add_column(name, justify="right")
    for worker in snapshot.workers:
        table.add_row(worker.info.worker_id, worker.info.model, *_load(worker))
    return table


def _load(worker: WorkerSnapshot) -> tuple[str, ...]:
    report = worker.status
    if report is None:
        return ("-",) * 5
    used = 1 - report.free_blocks / worker.info.num_blocks
    return (
        str(report.num_running),
        str(report.num_waiting),
        f"{used:.0%} of {worker.info.num_blocks}",
        f"{report.cached_tokens / max(1, report.prompt_tokens):.0%}",
        f"{report.step_seconds * 1000:.0f} ms",
    )


def _models(snapshot: Status) -> Table:
    table = Table(title="Models", title_justify="left")
    table.add_column("model")
    table.add_column("context", justify="right")
    table.add_column("revision")
    table.add_column("workers now", justify="right")
    live = Counter(worker.info.model for worker in snapshot.workers)
    for card in snapshot.models:
        context, revision = f"{card.max_model_len:,}", card.revision[:12]
        table.add_row(card.name, context, revision, str(live[card.name]))
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} in a status")
