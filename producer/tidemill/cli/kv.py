"""``tidemill kv``: how well the workers' KV caches are used."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.protocol.kv_use import KvUse
from tidemill.status import Status, WorkerSnapshot

_COUNTS = ("blocks", "used", "cached", "free", "tokens", "empty slots\nper job", "utilisation")
_MOVES = ("swap", "out", "in", "forked", "evicted")


def kv(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show what the KV cache of each worker holds, and what of it is held in vain."""
    with open_producer(redis_url, shard=shard) as producer:
        snapshot = producer.status()
    if as_json:
        typer.echo(json.dumps({_name(worker): _plain(worker) for worker in snapshot.workers}))
    else:
        Console().print(render(snapshot))


def render(snapshot: Status) -> RenderableType:
    """Return the figures as a table, one row a worker, and what they mean."""
    if not snapshot.workers:
        return Text("No worker is here.")
    table = Table(title="KV caches", title_justify="left")
    table.add_column("worker")
    for name in (*_COUNTS, *_MOVES):
        table.add_column(name, justify="right")
    for worker in snapshot.workers:
        table.add_row(*map(Text, (_name(worker), *_row(worker))))
    note = (
        "used: held by jobs; cached: held by none, but found by the next job with that prefix.\n"
        "empty slots per job: the most that one job holds; utilisation: share of the used blocks'"
        " slots that hold a token.\n"
        "swap, out, in: blocks in host memory, and copied there and back; forked: copied on write."
    )
    return Group(table, Text(note, "dim"))


def _name(worker: WorkerSnapshot) -> str:
    return worker.info.worker_id


def _row(worker: WorkerSnapshot) -> tuple[str, ...]:
    use = worker.status.kv if worker.status else None
    if use is None:
        return ("-",) * len(_COUNTS + _MOVES)
    counts = (use.num_blocks, use.used_blocks, use.cached_blocks, use.free_blocks, use.num_tokens)
    moves = (use.swapped_out, use.swapped_in, use.forked, use.evicted)
    return (
        *(f"{count:,}" for count in counts),
        f"{use.most_empty_slots} of {use.block_size}",
        f"{use.utilisation:.1%}",
        f"{use.used_swap_blocks:,} of {use.swap_blocks:,}" if use.swap_blocks else "-",
        *(f"{count:,}" for count in moves),
    )


def _plain(worker: WorkerSnapshot) -> dict[str, Any] | None:
    use = worker.status.kv if worker.status else None
    return None if use is None else _figures(use)


def _figures(use: KvUse) -> dict[str, Any]:
    derived = {
        "free_blocks": use.free_blocks,
        "num_tokens": use.num_tokens,
        "utilisation": use.utilisation,
    }
    return use.model_dump() | derived
