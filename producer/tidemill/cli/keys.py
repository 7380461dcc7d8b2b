"""``tidemill keys``: who may call the gateway."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill._request import check_tenant
from tidemill.access.api_keys import (
    USUAL_SCOPES,
    ApiKey,
    Token,
    checked_scopes,
    parse_token,
    shard_of_key,
)
from tidemill.access.key_store import KeyStore
from tidemill.access.pepper import make_pepper, read_pepper
from tidemill.cli.connection import open_link
from tidemill.cli.outline import when
from tidemill.cli.submit import RedisUrl
from tidemill.protocol.errors import ConfigError
from tidemill.service.config import load_config, load_key_config

app = typer.Typer(
    no_args_is_help=True,
    help="""API keys of the gateway, for `tidemill up --require-keys`.

`tidemill keys create --tenant acme --name laptop` prints one; clients send it as their API key.

A key belongs to a tenant and allows some of: submit, read, cancel, admin. Gateways heed what
is changed here within seconds.
""",
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_GRACE = "24h"

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
KeyId = Annotated[
    str, typer.Argument(metavar="KEY_ID", help="The part between tmk_ and the next _.")
]


@app.command("create")
def create(
    tenant: Annotated[str, typer.Option(help="Whose jobs, files and quotas.")] = "default",
    scope: Annotated[
        list[str] | None,
        typer.Option(help="submit, read, cancel or admin; may be repeated. Default: the first 3."),
    ] = None,
    name: Annotated[str, typer.Option(help="For people: who has it, what it is for.")] = "",
    expires: Annotated[
        str | None, typer.Option(help="Such as 12h or 90d from now. Default: never.")
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=0, help="Requests that submit something. Default: the tenant's bounds."),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens of prompts and answers. Default: the tenant's bounds."),
    ] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Make a key and print it, once: what is kept is a digest of it."""
    scopes = checked_scopes(scope) if scope else USUAL_SCOPES
    seconds = None if expires is None else duration(expires)
    shard = load_config().shard_of(check_tenant(tenant))
    with _store(redis_url, shard, make_pepper(load_key_config())) as store:
        token, key = store.create(
            tenant,
            scopes=scopes,
            name=name,
            expires_seconds=seconds,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
    _tell(token, key, as_json)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show all keys without their secrets; they were used within a minute of the time shown."""
    found: list[ApiKey] = []
    for shard in load_config().shards:
        with _store(redis_url, shard) as store:
            found += [key for key in store.all() if tenant in (None, key.tenant)]
    if as_json:
        typer.echo(json.dumps([plain(key) for key in found]))
    else:
        Console().print(render(found))


@app.command("revoke")
def revoke(key_id: KeyId, redis_url: RedisUrl = None) -> None:
    """Take a key away: within seconds no gateway lets it in."""
    key_id = _bare(key_id)
    with _store(redis_url, shard_of_key(key_id)) as store:
        store.revoke(key_id)
    typer.echo(f"{key_id} is revoked")


@app.command("rotate")
def rotate(
    key_id: KeyId,
    grace: Annotated[
        str, typer.Option(help="How long the old one stays valid; 0s for not at all.")
    ] = _GRACE,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Make a key that allows the same, and let the old one expire."""
    key_id, seconds = _bare(key_id), duration(grace)
    pepper = read_pepper(load_key_config())
    with _store(redis_url, shard_of_key(key_id), pepper) as store:
        token, key = store.rotate(key_id, grace_seconds=seconds)
    _tell(token, key, as_json)


def duration(text: str) -> float:
    """Return the seconds of a text such as 90d; raises ``ConfigError``."""
    number, unit = text[:-1], text[-1:]
    if unit not in _SECONDS or not (number.isascii() and number.isdecimal()) or len(number) > 6:
        raise ConfigError(
            f"{text[:20]!r} is no length of time", fix="Write a whole number and s, m, h or d."
        )
    return int(number) * _SECONDS[unit]


def render(keys: list[ApiKey]) -> Table:
    """Return keys as a table."""
    table = Table(title="API keys", title_justify="left", box=box.SIMPLE, padding=0)
    titles = ("id", "tenant", "scopes", "name", "requests", "tokens/min", "created", "expires")
    for title in (*titles, "used"):
        table.add_column(title, overflow="fold")
    for key in keys:
        scopes = ",".join(sorted(key.scopes))
        bounds = (key.limits.requests, key.limits.tokens)
        limits = ("-" if bound is None else f"{bound:,}" for bound in bounds)
        times = (_day(ms) for ms in (key.created_ms, key.expires_ms, key.used_ms))
        # Text, not markup: anybody may have written there.
        table.add_row(*map(Text, (key.key_id, key.tenant, scopes, key.name, *limits, *times)))
    return table


def plain(key: ApiKey) -> dict[str, object]:
    """Return a key as JSON has it."""
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "name": key.name,
        "requests_per_minute": key.limits.requests,
        "tokens_per_minute": key.limits.tokens,
        "created": when(key.created_ms),
        "expires": None if key.expires_ms is None else when(key.expires_ms),
        "used": None if key.used_ms is None else when(key.used_ms),
    }


@contextmanager
def _store(redis_url: str | None, shard: str, pepper: bytes = b"") -> Iterator[KeyStore]:
    with open_link(redis_url, shard) as (link, keys):
        yield KeyStore(link, keys, pepper)


def _bare(key_id: str) -> str:
    token = parse_token(key_id)
    if token is not None:
        return token.key_id
    return key_id.removeprefix("tmk_")


def _tell(token: Token, key: ApiKey, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"key": token.text, **plain(key)}))
        return
    typer.echo(token.text)
    typer.echo(f"It is tenant {key.tenant}'s and will not be shown again.", err=True)


def _day(unix_ms: int | None) -> str:
    return "-" if unix_ms is None else when(unix_ms)[:16].replace("T", " ")
