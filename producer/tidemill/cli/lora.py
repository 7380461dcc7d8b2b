"""``tidemill lora``: which adapters jobs may name."""

import json
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.protocol.messages import AdapterCard


def lora(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """List the LoRA adapters of the served models.

    Adapters come and go with the directories in the workers' --lora-dir.
    """
    with open_producer(redis_url, shard=shard) as producer:
        models = sorted({worker.info.model for worker in producer.status().workers})
        adapters = {model: producer.model(model).adapters for model in models}
    if as_json:
        plain = {
            model: [each.model_dump(mode="json") for each in cards]
            for model, cards in adapters.items()
        }
        typer.echo(json.dumps(plain))
    else:
        Console().print(render(adapters))


def render(adapters: dict[str, tuple[AdapterCard, ...]]) -> RenderableType:
    """Return the adapters as a table, one row each."""
    if not any(adapters.values()):
        return Text("No model has an adapter.")
    table = Table(title="LoRA adapters", title_justify="left")
    for name in ("model", "adapter", "rank", "digest"):
        table.add_column(name, justify="right" if name == "rank" else "left")
    for model, cards in adapters.items():
        for card in cards:
            table.add_row(*map(Text, (model, card.name, str(card.rank), card.digest[:12])))
    return table
