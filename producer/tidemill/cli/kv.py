"""``tidemill kv``: how well the workers' KV caches are used."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.protocol.kv_use import KvUse
from tidemill.status import Status, WorkerSnapshot

_NOTE = """\
utilisation: share of the slots in used blocks that hold a token; at most N empty:
slots that one job holds in vain. cached: held by no job, but found by the next one
with that prefix. swap: host memory; forked: copied on write; evicted: overwritten."""


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
    """Return a few lines for each worker, the waste first, and what they mean.

    Not a table: its columns would not fit into 80 characters.
    """
    if not snapshot.workers:
        return Text("No worker is here.")
    lines = [line for worker in snapshot.workers for line in _lines(worker)]
    return Group(*lines, Text(_NOTE, "dim"))


def _lines(worker: WorkerSnapshot) -> list[Text]:
    use = _use(worker)
    facts = _facts(use) if use else [("waste", "-")]
    return [Text(_name(worker), "bold"), *(Text(f"  {name:<7}{fact}") for name, fact in facts)]


def _facts(use: KvUse) -> list[tuple[str, str]]:
    in_swap = f"{use.used_swap_blocks:,} of {use.swap_blocks:,} blocks" if use.swap_blocks else "-"
    return [
        ("waste", f"utilisation {use.utilisation:.1%}, {_empty(use)}"),
        (
            "blocks",
            f"{use.num_blocks:,}: {use.used_blocks:,} used, {use.cached_blocks:,} cached,"
            f" {use.free_blocks:,} free",
        ),
        ("tokens", f"{use.num_tokens:,} in used blocks"),
        ("swap", f"{in_swap}; {use.swapped_out:,} went out, {use.swapped_in:,} came in"),
        ("moves", f"{use.forked:,} forked, {use.evicted:,} evicted"),
    ]


def _empty(use: KvUse) -> str:
    return f"at most {use.most_empty_slots} of {use.block_size} slots empty per job"


def _name(worker: WorkerSnapshot) -> str:
    return worker.info.worker_id


def _use(worker: WorkerSnapshot) -> KvUse | None:
    return worker.status.kv if worker.status else None


def _plain(worker: WorkerSnapshot) -> dict[str, Any] | None:
    use = _use(worker)
    return None if use is None else _figures(use)


def _figures(use: KvUse) -> dict[str, Any]:
    derived = {
        "free_blocks": use.free_blocks,
        "num_tokens": use.num_tokens,
        "utilisation": use.utilisation,
    }
    return use.model_dump() | derived
