"""``tidemill simulate``: what a policy makes of a trace."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.cli.costs import read_cost
from tidemill_scheduler.simulation.cli.plot import check_plot_path, save_plot
from tidemill_scheduler.simulation.cli.progress import run_policies
from tidemill_scheduler.simulation.cli.table import make_table
from tidemill_scheduler.simulation.cli.workloads import find_workload
from tidemill_scheduler.simulation.cluster import (
    MAX_KV_TOKENS,
    MAX_SECONDS,
    MAX_STEP_TOKENS,
    Cluster,
)
from tidemill_scheduler.simulation.generators import GENERATORS
from tidemill_scheduler.simulation.policies import POLICIES, make_policy
from tidemill_scheduler.simulation.simulator import Simulation
from tidemill_scheduler.simulation.workload import MAX_LOAD, MIN_LOAD, Workload

#: The longest duration of an option.
_MAX_MS = 1000 * MAX_SECONDS

app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace: Mooncake's .jsonl or Azure's .csv; or a made-up workload: "
            + ", ".join(GENERATORS)
            + "."
        ),
    ],
    workers: Annotated[int, typer.Option(min=1, max=100_000, help="Simulated workers.")] = 8,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Who decides; repeat it to compare, or say all. There are: "
            + ", ".join(POLICIES)
            + "."
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online/--bulk", help="Let jobs come when the trace says, or all at the start."
        ),
    ] = False,
    load: Annotated[
        float,
        typer.Option(min=MIN_LOAD, max=MAX_LOAD, help="Online: how many times as fast jobs come."),
    ] = 1.0,
    kv_tokens: Annotated[
        int,
        typer.Option(min=1, max=MAX_KV_TOKENS, help="Tokens that each worker's KV cache holds."),
    ] = Cluster(1).kv_tokens,
    step_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_STEP_TOKENS, help="Tokens of one engine step.")
    ] = Cluster(1).step_tokens,
    tpot_slo_ms: Annotated[
        float,
        typer.Option(
            min=0, max=_MAX_MS, help="Cap steps while interactive jobs decode; 0 for none."
        ),
    ] = 0.0,
    rtt_ms: Annotated[
        float,
        typer.Option(min=0, max=_MAX_MS, help="Between a decision and its arrival, and back."),
    ] = 0.0,
    scale: Annotated[
        float, typer.Option(min=0.0001, max=1.0, help="Share of the jobs to simulate.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Fixes everything random.")] = 0,
    cost: Annotated[
        Path | None, typer.Option(help="Step costs that `tidemill calibrate` has written.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the comparison into this .svg, .png or .pdf.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line a policy.")] = False,
) -> None:
    """Replay a trace on simulated workers, with the scheduler of the daemon and with others.

    The scheduler is the very code of the daemon; workers, network and clock are simulated. The same
    seed gives the same output, byte by byte.

    Examples: `tidemill simulate rag1 --workers 8 --policy all --plot rag.svg`,
    `tidemill simulate conversation_trace.jsonl --online --load 3 --policy tidemill --policy fifo`.
    """
    if plot is not None:
        check_plot_path(plot)
    names = _names_of(policy)
    cluster = Cluster(
        workers,
        kv_tokens=kv_tokens,
        step_tokens=step_tokens,
        cost=read_cost(cost),
        tpot_slo_seconds=tpot_slo_ms / 1000,
        rtt_seconds=rtt_ms / 1000,
    )
    workload = _workload(trace, seed, scale, load=load, is_online=online)
    reports = run_policies(names, Simulation(cluster, workload, seed=seed), workload.num_jobs)
    if json:
        for name, report in reports.items():
            typer.echo(f'{{"policy": "{name}", "report": {report.to_json()}}}')
    else:
        Console().print(make_table(reports, is_bulk=not online))
    if plot is not None:
        save_plot(reports, plot, is_bulk=not online)


def _names_of(policies: list[str] | None) -> list[str]:
    names = policies or ["tidemill", "fifo"]
    if "all" in names:
        return list(POLICIES)
    for name in names:
        make_policy(name)
    return list(dict.fromkeys(names))


def _workload(trace: str, seed: int, scale: float, *, load: float, is_online: bool) -> Workload:
    workload = find_workload(trace, seed, scale)
    if not is_online:
        return workload if workload.is_bulk else workload.as_bulk()
    if workload.is_bulk:
        raise ConfigError(
            f"trace: {trace} does not say when its jobs come",
            fix="Leave --online out, or give a trace with times.",
        )
    return workload.compressed(load)
