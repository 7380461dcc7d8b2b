"""``tidemill webhooks``: endpoints of tenants, what was delivered to them, and a worker."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill._request import check_tenant
from tidemill.cli.connection import open_link
from tidemill.cli.outline import when
from tidemill.cli.processes import PASS_ON
from tidemill.protocol.errors import ConfigError
from tidemill.service.broker_url import redact
from tidemill.service.config import load_config, load_webhook_config
from tidemill_webhooks.admin import DeliveryView, HookAdmin
from tidemill_webhooks.endpoints import ROTATION_SECONDS, Endpoint

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="""Tell the owners of finished jobs and batches by signed webhooks.

Receivers check them with any library for Standard Webhooks, or with
`client.webhooks.unwrap` of OpenAI's. See docs/webhooks.md.
""",
)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="TIDEMILL_REDIS_URL",
        help="Address of the broker. Default: the one that `tidemill up` started here.",
    ),
]
Tenant = Annotated[str, typer.Option(help="Whose endpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
EndpointId = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Such as we_01...")]
SecretOption = Annotated[
    str | None,
    typer.Option(
        help="whsec_ and base64 of 24 to 64 bytes. Default: a random one.",
    ),
]
Grace = Annotated[
    float,
    typer.Option("--grace-hours", min=0, help="How long the old secret stays in use as well."),
]


@contextmanager
def _admin(redis_url: str | None, tenant: str) -> Iterator[HookAdmin]:
    shard = load_config().shard_of(check_tenant(tenant))
    with open_link(redis_url, shard) as (link, keys):
        yield HookAdmin(link, keys, tenant)


@app.command("add")
def add(
    url: Annotated[str, typer.Argument(help="An https address, on port 443 or 8443.")],
    event: Annotated[
        list[str] | None,
        typer.Option(help="Send only this, such as batch.* or response.failed; repeatable."),
    ] = None,
    description: Annotated[str, typer.Option(help="For people.")] = "",
    secret: SecretOption = None,
    allow_private: Annotated[
        bool,
        typer.Option(help="Take http, any port and any address: for development alone."),
    ] = False,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Add an endpoint and print its id and its secret."""
    allowed = allow_private or load_webhook_config().allow_private
    with _admin(redis_url, tenant) as admin:
        endpoint = admin.add(
            url,
            events=event or (),
            description=description[:200],
            secret=secret,
            allow_private=allowed,
        )
    value = endpoint.secrets[0].value
    if as_json:
        typer.echo(json.dumps({"endpoint": endpoint.endpoint_id, "secret": value}))
    else:
        typer.echo(f"{endpoint.endpoint_id}\n{value}")


@app.command("list")
def list_endpoints(
    tenant: Tenant = "default", as_json: AsJson = False, redis_url: RedisUrl = None
) -> None:
    """Show a tenant's endpoints, without their secrets."""
    with _admin(redis_url, tenant) as admin:
        endpoints = sorted(admin.hooks().endpoints.values(), key=lambda one: one.endpoint_id)
    if as_json:
        typer.echo(json.dumps([_plain(endpoint) for endpoint in endpoints]))
    else:
        Console().print(_endpoint_table(endpoints))


@app.command("rotate")
def rotate(
    endpoint: EndpointId,
    secret: SecretOption = None,
    grace_hours: Grace = ROTATION_SECONDS / 3600,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Give an endpoint a new secret and print it; the old one signs as well for a while."""
    with _admin(redis_url, tenant) as admin:
        typer.echo(admin.rotate(endpoint, secret=secret, grace_seconds=grace_hours * 3600))


@app.command("secret")
def callback_secret(
    rotate_it: Annotated[bool, typer.Option("--rotate", help="Make or take a new one.")] = False,
    secret: SecretOption = None,
    grace_hours: Grace = ROTATION_SECONDS / 3600,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Print what the callbacks of a tenant's jobs are signed with, and make it if there is none."""
    with _admin(redis_url, tenant) as admin:
        known = None if rotate_it or secret else admin.callback_secret()
        grace = grace_hours * 3600
        typer.echo(known or admin.rotate_callback_secret(secret=secret, grace_seconds=grace))


@app.command("remove")
def remove(endpoint: EndpointId, tenant: Tenant = "default", redis_url: RedisUrl = None) -> None:
    """Remove an endpoint; what is on its way to it is given up."""
    with _admin(redis_url, tenant) as admin:
        admin.remove(endpoint)


@app.command("enable")
def enable(endpoint: EndpointId, tenant: Tenant = "default", redis_url: RedisUrl = None) -> None:
    """Send events to an endpoint again, from now on."""
    with _admin(redis_url, tenant) as admin:
        admin.switch(endpoint, "")


@app.command("disable")
def disable(
    endpoint: EndpointId,
    reason: Annotated[str, typer.Option(help="For people.")] = "switched off by an operator",
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Send no events to an endpoint until it is enabled."""
    with _admin(redis_url, tenant) as admin:
        admin.switch(endpoint, reason[:200] or "switched off")


@app.command("test")
def test_endpoint(
    endpoint: EndpointId, tenant: Tenant = "default", redis_url: RedisUrl = None
) -> None:
    """Send a `tidemill.test` event to an endpoint and print the delivery's id."""
    with _admin(redis_url, tenant) as admin:
        typer.echo(admin.test(endpoint))


# pytest would take it for a test where a test imports it.
test_endpoint.__test__ = False  # type: ignore[attr-defined]


@app.command("deliveries")
def deliveries(
    state: Annotated[
        str | None, typer.Option(help="Only those: pending, delivered or failed.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Only to this endpoint.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Look at so many.")] = 50,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show what was sent and how it went, the newest first."""
    with _admin(redis_url, tenant) as admin:
        found = _chosen(admin, state=state, endpoint=endpoint, limit=limit)
    if as_json:
        typer.echo(json.dumps([asdict(view) for view in found]))
    else:
        Console().print(_delivery_table(found))


@app.command("replay")
def replay(
    delivery: Annotated[
        list[str] | None, typer.Argument(help="Deliveries, such as evt_...-we_....")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="All that failed.")] = False,
    endpoint: Annotated[str | None, typer.Option(help="With --failed: of this endpoint.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Look at so many.")] = 1000,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Deliver again, under the same event id, with ten tries more."""
    if bool(delivery) is failed:
        raise ConfigError("say which: name deliveries, or pass --failed")
    with _admin(redis_url, tenant) as admin:
        ids = list(delivery or ())
        if failed:
            views = _chosen(admin, state="failed", endpoint=endpoint, limit=limit)
            ids = [view.delivery_id for view in views]
        num_replayed = sum(admin.replay(delivery_id) for delivery_id in ids)
    typer.echo(f"{num_replayed} of {len(ids)} will be delivered again")


@app.command("worker", context_settings=PASS_ON)
def worker(context: typer.Context) -> None:
    """Run a worker that delivers from RQ's queue; see its --help."""
    _become(context.args)


def _become(arguments: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tidemill_webhooks", *arguments])


def _chosen(
    admin: HookAdmin, *, state: str | None, endpoint: str | None, limit: int
) -> list[DeliveryView]:
    return [
        view
        for view in admin.deliveries(limit=limit)
        if state in (None, view.state) and endpoint in (None, view.endpoint_id)
    ]


def _plain(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "endpoint": endpoint.endpoint_id,
        "url": endpoint.url,
        "events": list(endpoint.events),
        "description": endpoint.description,
        "created": when(endpoint.created_ms),
        "off": endpoint.off_reason,
        "secrets": len(endpoint.secrets),
    }


def _endpoint_table(endpoints: list[Endpoint]) -> Table:
    table = _table("Endpoints", "endpoint", "url", "events", "on", "description")
    for one in endpoints:
        state = "yes" if one.is_on else f"no: {one.off_reason}"
        events = ", ".join(one.events) or "all"
        table.add_row(
            *map(Text, (one.endpoint_id, redact(one.url), events, state, one.description))
        )
    return table


def _delivery_table(views: list[DeliveryView]) -> Table:
    table = _table("Deliveries", "delivery", "event", "about", "state", "tries", "last", "when")
    for view in views:
        last = view.attempts[-1] if view.attempts else None
        told = "-" if last is None else str(last.status or last.error)
        moment = when(last.time_ms if last else view.created_ms)
        row = (view.delivery_id, view.event_type, view.about, view.state)
        table.add_row(*map(Text, (*row, str(len(view.attempts)), told, moment)))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
