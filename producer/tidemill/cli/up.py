"""``tidemill up``: broker, scheduler and workers on this machine until Ctrl-C."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.access.pepper import make_pepper
from tidemill.cli.gateway import DEFAULT_PORT, choose_port, has_gateway, require_gateway
from tidemill.cli.gateway_options import GatewayOptions
from tidemill.cli.model import find_model, require_extras
from tidemill.cli.stack import Stack, StackOptions
from tidemill.protocol.errors import ConfigError, TidemillError
from tidemill.service.broker_url import redact
from tidemill.service.config import load_config, load_key_config, split_keys
from tidemill.service.log import setup_logging
from tidemill.service.runtime import Drain


def up(
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face model directory. Default: a small real demo model."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use. Default: the directory's name.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of worker processes.")] = 1,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="TIDEMILL_REDIS_URL",
            help="Use this Redis >= 7.0 or Valkey instead of starting an embedded one.",
        ),
    ] = None,
    broker_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Let the embedded server listen on 127.0.0.1:PORT too."
        ),
    ] = None,
    gateway: Annotated[
        bool | None,
        typer.Option(
            "--gateway/--no-gateway",
            help="Serve OpenAI's API over HTTP. Default: if the extra is installed.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address the gateway listens on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="The gateway's port. Default: the first free one from 8000."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TIDEMILL_API_KEY",
            help="Key that HTTP clients must send; several are separated by commas.",
        ),
    ] = None,
    require_keys: Annotated[
        bool,
        typer.Option("--require-keys", help="Let HTTP clients in who have a `tidemill keys` key."),
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded server keeps the queue.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    num_threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of each worker. Default: cores / workers."),
    ] = None,
    allow_private_webhooks: Annotated[
        bool,
        typer.Option(
            "--allow-private-webhooks",
            help="Deliver webhooks over http, to any port and address: for development alone.",
        ),
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="On Ctrl-C, how long running jobs may take to finish.")
    ] = 30.0,
    worker_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- WORKER_OPTIONS]",
            help="Passed to every worker; see `tidemill worker --help`.",
        ),
    ] = None,
) -> None:
    """Run broker, scheduler and workers on this machine; Ctrl-C drains and stops them.

    Everything that dies is started again. Jobs accepted before a restart go on after it.
    """
    config = load_config()
    setup_logging(config.log_level, "up")
    require_extras("torch", "sortedcontainers")
    directory, name = find_model(model, config.cache_dir)
    data_dir = data_dir or config.data_dir
    if require_keys:
        # Told here: a gateway that ends at once for want of it would be started again and again.
        make_pepper(load_key_config({**os.environ, "TIDEMILL_DATA_DIR": str(data_dir)}))
    keys = ("--require-keys",) if require_keys else ()
    private = ("--allow-private-webhooks",) if allow_private_webhooks else ()
    options = StackOptions(
        redis_url=redis_url,
        data_dir=data_dir,
        port=broker_port,
        gateway=_gateway_options(gateway, host, port, api_key, (*keys, *private)),
        shard=config.shard,
        num_workers=workers,
        drain_seconds=drain_seconds,
        scheduler_args=private,
        worker_args=(
            *("--model", str(directory), "--served-model-name", served_model_name or name),
            *("--device", device, "--dtype", dtype),
            *(("--num-threads", str(num_threads)) if num_threads else ()),
            *(worker_args or ()),
        ),
        environment=thread_environment(workers, num_threads),
    )
    run_until_signal(options)


def _gateway_options(
    wanted: bool | None, host: str, port: int | None, api_key: str | None, args: tuple[str, ...]
) -> GatewayOptions | None:
    if wanted is False or (wanted is None and not has_gateway()):
        return None
    require_gateway()
    if api_key is not None and not split_keys(api_key):
        # As of a variable that is not set; without a key everybody would be let in.
        raise ConfigError("--api-key holds no key", fix="Give one, or leave the option out.")
    secrets = (("TIDEMILL_API_KEY", api_key),) if api_key else ()
    chosen = choose_port(host, port, DEFAULT_PORT)
    return GatewayOptions(port=chosen, host=host, args=args, environment=secrets)


def run_until_signal(options: StackOptions) -> None:
    """Start a stack and keep it until SIGINT or SIGTERM; raises ``TidemillError`` if it fails."""
    console = Console(stderr=True, highlight=False)
    drain = Drain()
    # Entered after the stack: until it is up, Ctrl-C is a plain interrupt that takes it down.
    with Stack(options, sink=echo, on_failure=drain.request) as stack, drain:
        console.print(
            f"[bold green]Tidemill is up[/] at {redact(stack.url)}"
            f" (durability: {stack.durability}, workers: {options.num_workers})."
            ' Try: tidemill submit "Why is the sky blue?"   Ctrl-C drains and stops.'
        )
        if options.gateway is not None:
            console.print(_greeting(options.gateway), soft_wrap=True, markup=False)
        if stack.durability == "none":
            console.print(
                "[yellow]warning:[/] this broker keeps no log: a restart of it loses every job."
                " Run it with `appendonly yes`."
            )
        drain.draining.wait()
        if stack.failure is None:
            console.print("Draining: no new work, finishing what runs. Ctrl-C again to stop now.")
    if stack.failure is not None:
        raise TidemillError(stack.failure)


def _greeting(gateway: GatewayOptions) -> str:
    is_locked = gateway.environment or "--require-keys" in gateway.args
    key = " -H 'Authorization: Bearer KEY'" if is_locked else ""
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
    return (
        f"OpenAI's API is at {gateway.url}/v1 for any client. Try:\n"
        f"  curl {gateway.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f"       -d '{body}'"
    )


def echo(line: str) -> None:
    """Pass on a line that a process printed."""
    sys.stderr.write(line)
    sys.stderr.flush()


def thread_environment(workers: int, num_threads: int | None) -> tuple[tuple[str, str], ...]:
    """Return the OpenMP variables of a worker: its share of the cores, and no spinning."""
    # A container or `taskset` may leave fewer than the machine has; threads beyond them only wait.
    threads = num_threads or max(1, len(os.sched_getaffinity(0)) // workers)
    return (
        ("OMP_WAIT_POLICY", "passive"),
        ("GOMP_SPINCOUNT", "0"),
        ("OMP_NUM_THREADS", str(threads)),
    )
