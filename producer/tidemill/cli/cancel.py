"""``tidemill cancel``: one job, a batch, or everything a tenant has submitted."""

from typing import Annotated

import typer

from tidemill.batch import CancelCounts
from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Tenant
from tidemill.client import Producer
from tidemill.protocol.errors import ConfigError


def cancel(
    job_id: Annotated[str | None, typer.Argument(help="The job's id.")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Every job of this batch, and close it.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every job that the tenant has submitted.")
    ] = False,
    tenant: Tenant = "default",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """End jobs now, wherever they are: waiting, delayed or running.

    `tidemill cancel JOB`, `tidemill cancel --batch night`, or `tidemill cancel --all`.

    Their partial output is kept. For one job its final state is printed. A cancelled batch takes no
    more jobs; `--all` leaves alone what is submitted after it.
    """
    if [job_id is not None, batch is not None, everything].count(True) != 1:
        raise ConfigError(
            "cancel takes one of: a job id, --batch NAME, --all",
            fix="See `tidemill cancel --help`.",
        )
    with open_producer(redis_url, tenant=tenant) as producer:
        if job_id is not None:
            typer.echo(producer.cancel(job_id).value)
        elif batch is not None:
            _cancel_batch(producer, batch, yes)
        else:
            _cancel_all(producer, tenant, yes)


def confirm(question: str, yes: bool) -> None:
    """Go on only if the answer is yes; raises ``typer.Abort`` otherwise."""
    if not yes:
        typer.confirm(question, abort=True, err=True)


def _cancel_batch(producer: Producer, name: str, yes: bool) -> None:
    status = producer.batch(name).status()
    if not status.total:
        raise ConfigError(f"there is no batch {name!r}", fix="Check its name and the --tenant.")
    confirm(f"Cancel the {status.unfinished} unfinished jobs of batch {name}?", yes)
    _tell(producer.cancel_batch(name))


def _cancel_all(producer: Producer, tenant: str, yes: bool) -> None:
    confirm(f"Cancel every unfinished job of tenant {tenant}?", yes)
    _tell(producer.cancel_tenant())


def _tell(counts: CancelCounts) -> None:
    ended = f", {counts.ended} ended by themselves meanwhile" if counts.ended else ""
    typer.echo(f"{counts.cancelled} cancelled{ended}")
