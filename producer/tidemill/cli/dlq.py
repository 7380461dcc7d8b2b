"""``tidemill dlq``: look at dead letters, run their jobs again, drop them."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.cli.cancel import confirm
from tidemill.cli.connection import open_link
from tidemill.cli.outline import outline, when
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.dead_letters import DeadLetter, DeadLetters
from tidemill.protocol.errors import BrokerError, ConfigError, Overloaded, TidemillError

app = typer.Typer(
    no_args_is_help=True,
    help="""Dead letters: jobs that were given up, and entries that nobody could read.

A job is given up when its retries are used up (`max_retries`) or when it crashed three workers
without a new token. First `tidemill dlq list`, then `show` one to see why; once the cause is gone
`requeue` runs the job again as a new one whose parent is the dead one, and `drop` gives it up.
Letters are told apart by their own ids or by those of their jobs.
""",
)

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of letters or jobs.")
]
All = Annotated[bool, typer.Option("--all", help="Every letter that the filters let through.")]
Reason = Annotated[str, typer.Option(help="Only those whose reason contains this text.")]
OfTenant = Annotated[str, typer.Option("--tenant", help="Only those of this tenant.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


@app.command("list")
def list_letters(
    reason: Reason = "",
    tenant: OfTenant = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the oldest first.")] = 100,
    as_json: AsJson = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """List dead letters, the oldest first."""
    with open_link(redis_url, shard) as (link, keys):
        found = DeadLetters(link, keys).search(reason=reason, tenant=tenant)
        letters = list(islice(found, limit + 1))
    if as_json:
        for letter in letters[:limit]:
            typer.echo(json.dumps(_plain(letter)))
        return
    Console().print(render(letters[:limit]))
    if len(letters) > limit:
        Console(stderr=True).print(f"There are more; see --limit (now {limit}) and the filters.")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a letter or of its job.")],
    prompt: Annotated[
        bool, typer.Option("--prompt", help="Print the prompt's text too, or the entry's body.")
    ] = False,
    as_json: AsJson = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show one letter and an outline of its request; the prompt only when asked for."""
    with open_link(redis_url, shard) as (link, keys):
        letters = DeadLetters(link, keys)
        letter = letters.find(name)
        details = {**_plain(letter), **outline(letters.job(letter), with_prompt=prompt)}
    if prompt and letter.body:
        details["body"] = letter.body.decode("utf-8", "backslashreplace")
    if as_json:
        typer.echo(json.dumps(details))
        return
    table = Table(title=f"Dead letter {letter.letter_id}", title_justify="left", show_header=False)
    for field, value in details.items():
        table.add_row(field, Text(value if isinstance(value, str) else json.dumps(value)))
    Console().print(table)


@app.command("requeue")
def requeue(
    names: Names = None,
    everything: All = False,
    reason: Reason = "",
    tenant: OfTenant = "",
    yes: Yes = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run the jobs of dead letters again, each as a new job, and drop the letters.

    A repeated call never makes a second new job. Letters that are no jobs cannot be requeued.
    """
    with open_link(redis_url, shard) as (link, keys):
        letters = DeadLetters(link, keys)
        chosen = _choose(letters, names, everything, reason=reason, tenant=tenant)
        _confirm_all("Requeue", chosen, everything, yes)
        _for_each(chosen, lambda letter: f"{letter.job_id} -> {letters.requeue(letter)}")


@app.command("drop")
def drop(
    names: Names = None,
    everything: All = False,
    reason: Reason = "",
    tenant: OfTenant = "",
    yes: Yes = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Give dead letters up for good, with their jobs and partial results."""
    with open_link(redis_url, shard) as (link, keys):
        letters = DeadLetters(link, keys)
        chosen = _choose(letters, names, everything, reason=reason, tenant=tenant)
        _confirm_all("Drop", chosen, everything, yes)

        def drop_one(letter: DeadLetter) -> str:
            return f"{letter.letter_id} {'dropped' if letters.drop(letter) else 'was gone'}"

        _for_each(chosen, drop_one)


def render(letters: Sequence[DeadLetter]) -> Table:
    """Return letters as a table."""
    table = Table(title="Dead letters", title_justify="left", box=box.SIMPLE)
    # Ids in one column and never cut off, so that they can be copied from a narrow terminal too.
    table.add_column("letter and job", no_wrap=True)
    table.add_column("written")
    table.add_column("tenant", overflow="fold")
    table.add_column("tries", justify="right")
    table.add_column("reason", overflow="fold")
    for letter in letters:
        job = letter.job_id or f"no job: {letter.entry_id} of {letter.queue}"
        written = when(letter.time_ms)[:19].replace("T", " ")
        cells = (
            written,
            letter.tenant,
            "?" if letter.attempts is None else str(letter.attempts),
            letter.reason,
        )
        # Text, not markup: reasons come from everywhere.
        table.add_row(*map(Text, (f"{letter.letter_id}\n{job}", *cells)))
    return table


def _plain(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter": letter.letter_id,
        "written": when(letter.time_ms),
        "reason": letter.reason,
        "tenant": letter.tenant,
        "job": letter.job_id,
        "attempts": letter.attempts,
        "worker": letter.worker_id,
        "queue": letter.queue,
        "entry": letter.entry_id,
        "body_bytes": len(letter.body),
    }


def _choose(
    letters: DeadLetters, names: list[str] | None, everything: bool, *, reason: str, tenant: str
) -> list[DeadLetter]:
    if bool(names) == everything:
        raise ConfigError("either ids or --all say which letters", fix="See `tidemill dlq list`.")
    if everything:
        return list(letters.search(reason=reason, tenant=tenant))
    if reason or tenant:
        raise ConfigError("--reason and --tenant choose among --all", fix="Leave the ids out.")
    return [letters.find(name) for name in names or ()]


def _confirm_all(verb: str, chosen: Sequence[DeadLetter], everything: bool, yes: bool) -> None:
    if everything and chosen:
        confirm(f"{verb} {len(chosen)} dead letters?", yes)


def _for_each(chosen: Sequence[DeadLetter], act: Callable[[DeadLetter], str]) -> None:
    """Act on every letter and print what came of it; exit status 1 if one could not be handled."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    num_failed = 0
    for letter in chosen:
        try:
            typer.echo(_patiently(letter, act, console))
        except BrokerError:
            raise
        except TidemillError as error:
            num_failed += 1
            console.print(f"error: {error.one_line()}", style="red")
    if num_failed:
        raise typer.Exit(1)


def _patiently(letter: DeadLetter, act: Callable[[DeadLetter], str], console: Console) -> str:
    while True:
        try:
            return act(letter)
        except Overloaded as error:
            console.print(f"{error.message}; again in {error.retry_after_seconds:.1f} s")
            time.sleep(error.retry_after_seconds)
