"""``tidemill tenant``: what a tenant may have in the queue, how fast it may submit, its share."""

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.cli.connection import open_link
from tidemill.cli.submit import RedisUrl, Shard
from tidemill.protocol.errors import ConfigError
from tidemill.tenant_limits import (
    EVERYONE,
    OF_SHARD,
    LimitSettings,
    Setting,
    TenantLimits,
)

app = typer.Typer(
    no_args_is_help=True,
    help="""Limits of tenants. They hold at once, for jobs submitted from then on.

`tidemill tenant set acme --max-jobs 1000 --requests-per-minute 600`

`*` stands for every tenant without a limit of its own. A tenant at a limit gets `QueueFull` or
`RateLimited` with the time after which to try again; its jobs that wait or run are not touched.
""",
)

Tenant = Annotated[str, typer.Argument(help="The tenant, or '*' for all without their own.")]


def _taken(option: str) -> Any:
    return typer.Option(option, help="Take this one away.")


_OTHERS = {
    Setting.REQUESTS_PER_MINUTE: "jobs a minute",
    Setting.TOKENS_PER_MINUTE: "tokens a minute",
    Setting.BACK_DOOR: "back door",
    Setting.WEIGHT: "weight",
    Setting.MAX_RESPONSE_BYTES: "kept bytes",
}


@app.command("list")
def list_tenants(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show the limits of all tenants that have any, and what waits in their queues."""
    with open_link(redis_url, shard) as (link, keys):
        tenants = LimitSettings(link, keys).read()
    if as_json:
        typer.echo(json.dumps([_plain(tenant) for tenant in tenants]))
    else:
        Console().print(render(tenants))


@app.command("set")
def set_limits(
    tenant: Tenant,
    max_jobs: Annotated[
        int | None, typer.Option(min=0, help="Waiting jobs; 0 lets no job in.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Prompt and longest output of all waiting jobs.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=0, help="Jobs submitted.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Prompt and longest output of the jobs submitted.")
    ] = None,
    back_door: Annotated[
        int | None,
        typer.Option(min=0, help="Ended jobs kept on the tenant's back-door stream; 0: none."),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(min=0.1, max=100, help="Share of the workers beside tenants that have 1."),
    ] = None,
    max_response_bytes: Annotated[
        int | None, typer.Option(min=0, help="What is kept of its responses; 0: nothing.")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="'*' only: requests of the shard's unfinished jobs."),
    ] = None,
    max_result_bytes: Annotated[
        int | None, typer.Option(min=1, help="'*' only: what the shard's ended jobs keep.")
    ] = None,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Set limits of one tenant; those not named stay as they are."""
    given = {
        Setting.MAX_JOBS: max_jobs,
        Setting.MAX_TOKENS: max_tokens,
        Setting.REQUESTS_PER_MINUTE: requests_per_minute,
        Setting.TOKENS_PER_MINUTE: tokens_per_minute,
        Setting.BACK_DOOR: back_door,
        Setting.WEIGHT: weight,
        Setting.MAX_RESPONSE_BYTES: max_response_bytes,
        Setting.MAX_BYTES: max_bytes,
        Setting.MAX_RESULT_BYTES: max_result_bytes,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        raise ConfigError("no limit is named", fix="See `tidemill tenant set --help`.")
    with open_link(redis_url, shard) as (link, keys):
        LimitSettings(link, keys).set(tenant, values)


@app.command("unset")
def unset(
    tenant: Tenant,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LIMIT]...", help="Such as max-jobs. Default: all of them."),
    ] = None,
    max_jobs: Annotated[bool, _taken("--max-jobs")] = False,
    max_tokens: Annotated[bool, _taken("--max-tokens")] = False,
    requests_per_minute: Annotated[bool, _taken("--requests-per-minute")] = False,
    tokens_per_minute: Annotated[bool, _taken("--tokens-per-minute")] = False,
    back_door: Annotated[bool, _taken("--back-door")] = False,
    weight: Annotated[bool, _taken("--weight")] = False,
    max_response_bytes: Annotated[bool, _taken("--max-response-bytes")] = False,
    max_bytes: Annotated[bool, _taken("--max-bytes")] = False,
    max_result_bytes: Annotated[bool, _taken("--max-result-bytes")] = False,
    shard: Shard = None,
    redis_url: RedisUrl = None,
) -> None:
    """Take limits away, so that those of `*` hold again; name them with dashes or without."""
    flags = {
        Setting.MAX_JOBS: max_jobs,
        Setting.MAX_TOKENS: max_tokens,
        Setting.REQUESTS_PER_MINUTE: requests_per_minute,
        Setting.TOKENS_PER_MINUTE: tokens_per_minute,
        Setting.BACK_DOOR: back_door,
        Setting.WEIGHT: weight,
        Setting.MAX_RESPONSE_BYTES: max_response_bytes,
        Setting.MAX_BYTES: max_bytes,
        Setting.MAX_RESULT_BYTES: max_result_bytes,
    }
    chosen = [_setting(name) for name in names or ()]
    chosen += [name for name, is_given in flags.items() if is_given and name not in chosen]
    if not chosen:
        chosen = [name for name in Setting if tenant == EVERYONE or name not in OF_SHARD]
    with open_link(redis_url, shard) as (link, keys):
        typer.echo(f"{LimitSettings(link, keys).unset(tenant, chosen)} taken away")


def render(tenants: list[TenantLimits]) -> Table:
    """Return limits and use as a table."""
    table = Table(title="Tenants", title_justify="left", box=box.SIMPLE, padding=0)
    table.caption = _caption(tenants)
    table.add_column("tenant", overflow="fold")
    for title in ("queued", "max jobs", "tokens", "max tokens", *_OTHERS.values()):
        table.add_column(title, justify="right")
    for tenant in tenants:
        row = (
            f"{tenant.queued_jobs:,}",
            _told(tenant, Setting.MAX_JOBS),
            f"{tenant.queued_tokens:,}",
            _told(tenant, Setting.MAX_TOKENS),
            *(_told(tenant, name) for name in _OTHERS),
        )
        # Text, not markup: anybody may have written there.
        table.add_row(*map(Text, (tenant.tenant, *row)))
    return table


def _told(tenant: TenantLimits, name: Setting) -> str:
    if name in tenant.invalid:
        return f"invalid: {tenant.invalid[name]}"
    limit = tenant.settings.get(name)
    return "-" if limit is None else f"{limit:,}"


def _caption(tenants: list[TenantLimits]) -> Text:
    shard = next((t for t in tenants if t.tenant == EVERYONE), TenantLimits(EVERYONE, {}))
    told = (
        f"'*': all without their own. Bytes of unfinished requests: at most"
        f" {_told(shard, Setting.MAX_BYTES)}; of results: {_told(shard, Setting.MAX_RESULT_BYTES)}"
    )
    unknown = sorted(shard.invalid.keys() - set(Setting))
    return Text(f"{told}\nno settings, ignored: {', '.join(unknown)}" if unknown else told)


def _plain(tenant: TenantLimits) -> dict[str, object]:
    return {
        "tenant": tenant.tenant,
        "queued_jobs": tenant.queued_jobs,
        "queued_tokens": tenant.queued_tokens,
        **{name.name.lower(): tenant.settings.get(name) for name in Setting},
        "invalid": dict(tenant.invalid),
    }


def _setting(name: str) -> Setting:
    try:
        return Setting[name.replace("-", "_").upper()]
    except KeyError as error:
        known = ", ".join(setting.name.lower().replace("_", "-") for setting in Setting)
        raise ConfigError(f"{name!r} is not a limit", fix=f"There are: {known}.") from error
