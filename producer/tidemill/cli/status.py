"""``tidemill status``: what waits, what runs, who works."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.protocol.calls import Backlog
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill.service.diagnosis.finding import duration
from tidemill.status import Status, WorkerSnapshot
from tidemill.tenant_limits import EVERYONE, Setting, TenantLimits


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
    notes = (Text(f"note: {note}", "yellow") for note in snapshot.notes)
    return Group(_totals(snapshot), *notes, _workers(snapshot), _models(snapshot))


def _totals(snapshot: Status) -> Table:
    table = Table(title="Jobs", title_justify="left", caption=_caption(snapshot))
    table.add_column("tenant")
    for name in ("running", "queued", "tokens", "jobs/min", "tokens/min"):
        table.add_column(name, justify="right")
    limits = {tenant.tenant: tenant for tenant in snapshot.limits}
    common = limits.pop(EVERYONE, TenantLimits(EVERYONE, {}))
    for tenant in sorted(limits.keys() | snapshot.running_by_tenant.keys()):
        running = snapshot.running_by_tenant.get(tenant, 0)
        used = _used(limits.get(tenant, TenantLimits(tenant, {})), common)
        # Text, not markup: anybody may have written there.
        table.add_row(*map(Text, (tenant, str(running), *used)))
    table.add_section()
    table.add_row("all", str(snapshot.num_running), str(snapshot.num_queued))
    return table


def _used(tenant: TenantLimits, common: TenantLimits) -> tuple[str, ...]:
    """What a tenant has waiting of what it may have, and how fast it may submit."""

    def limit(name: Setting) -> float | None:
        return tenant.settings.get(name, common.settings.get(name))

    def of(used: int, name: Setting) -> str:
        return f"{used:,}" if limit(name) is None else f"{used:,} of {limit(name):,}"

    def rate(name: Setting) -> str:
        return "-" if limit(name) is None else f"{limit(name):,}"

    return (
        of(tenant.queued_jobs, Setting.MAX_JOBS),
        of(tenant.queued_tokens, Setting.MAX_TOKENS),
        rate(Setting.REQUESTS_PER_MINUTE),
        rate(Setting.TOKENS_PER_MINUTE),
    )


def _caption(snapshot: Status) -> str:
    leader = escape(snapshot.scheduler_id or "") or "[red]none: nothing is dispatched[/]"
    bound = f" of {snapshot.max_bytes / 1e6:,.0f}" if snapshot.max_bytes else ""
    return (
        f"delayed: {snapshot.num_delayed}; overdue: {snapshot.num_overdue};"
        f" dead letters: {snapshot.num_dead_letters}; at the front door:"
        f" {snapshot.num_at_front_door}; {snapshot.jobs_per_second:.1f} jobs/s end\n"
        f"durability of new jobs: {escape(snapshot.durability)}; requests take"
        f" {snapshot.queued_bytes / 1e6:,.1f}{bound} MB, results"
        f" {snapshot.result_bytes / 1e6:,.1f} MB\n"
        f"{_backlog(snapshot.backlog)}"
        f"scheduler {leader}, epoch {snapshot.scheduler_epoch}"
    )


def _backlog(backlog: Backlog | None) -> str:
    if backlog is None or not backlog.tokens_per_second:
        return ""
    names = ("interactive", "standard", "batch")
    told = (
        f"{name} {duration(1000 * work / backlog.tokens_per_second)}"
        for name, work in zip(names, backlog.work_by_class, strict=True)
    )
    return f"work that waits: {', '.join(told)}\n"


def _workers(snapshot: Status) -> Table:
    table = Table(title="Workers", title_justify="left")
    table.add_column("worker")
    table.add_column("model")
    for name in ("running", "waiting", "KV blocks used", "cache hits", "step"):
        table.add_column(name, justify="right")
    for worker in snapshot.workers:
        row = (worker.info.worker_id, worker.info.model, *_load(worker))
        table.add_row(*map(Text, row))
    return table


def _load(worker: WorkerSnapshot) -> tuple[str, ...]:
    report = worker.status
    if report is None:
        return ("-",) * 5
    return (
        str(report.num_running),
        str(report.num_waiting),
        _used_blocks(worker.info, report),
        # Prompt tokens are those that were computed.
        f"{report.cached_tokens / max(1, report.cached_tokens + report.prompt_tokens):.0%}",
        f"{report.step_seconds * 1000:.0f} ms",
    )


def _used_blocks(info: WorkerInfo, report: WorkerStatus) -> str:
    """The share of its KV cache that jobs hold; models that only embed or score have none."""
    if report.kv is None:
        return "-"
    return f"{1 - report.free_blocks / info.num_blocks:.0%} of {info.num_blocks}"


def _models(snapshot: Status) -> Table:
    table = Table(title="Models", title_justify="left")
    table.add_column("model")
    table.add_column("context", justify="right")
    table.add_column("revision")
    table.add_column("workers now", justify="right")
    live = Counter(worker.info.model for worker in snapshot.workers)
    for card in snapshot.models:
        context, revision = f"{card.max_model_len:,}", card.revision[:12]
        table.add_row(*map(Text, (card.name, context, revision, str(live[card.name]))))
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} in a status")
