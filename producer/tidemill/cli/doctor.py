"""``tidemill doctor``: what is wrong, and what to do about it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill._endpoint import find_endpoint
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.service.diagnosis.examine import examine
from tidemill.service.diagnosis.finding import Finding, Level
from tidemill.service.diagnosis.scan import DEFAULT_MAX_KEYS
from tidemill.service.redis import connect

_TIMEOUT_SECONDS = 5.0
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    max_keys: Annotated[
        int, typer.Option(min=1, help="Look at so many keys at most for lost jobs and leaks.")
    ] = DEFAULT_MAX_KEYS,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Check broker, scheduler, workers and queues; exit status 1 if something failed.

    Reads only, in small steps, so it may be run at any time.
    """
    endpoint = find_endpoint(redis_url, "default", shard)
    with connect(
        endpoint.url, shard=endpoint.keys.shard, timeout_seconds=_TIMEOUT_SECONDS, retries=1
    ) as client:
        findings = examine(client, endpoint.keys, max_keys=max_keys)
    healthy = all(finding.level is not Level.FAILURE for finding in findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": healthy, "checks": checks}))
    else:
        Console().print(render(findings))
    if not healthy:
        raise typer.Exit(1)


def render(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table."""
    table = Table(title="Doctor", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("finding")
    for finding in findings:
        # Text, not markup: names of jobs and keys come from users.
        told = Text(finding.finding)
        if finding.fix:
            told.append(f"\n-> {finding.fix}", style="dim")
        table.add_row(finding.check, Text(finding.level, _STYLES[finding.level]), told)
    return table
