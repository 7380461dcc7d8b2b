"""``tidemill calibrate``: what steps of a real worker cost."""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill.service.step_fit import fit_step_cost
from tidemill.service.step_log import read_step_log
from tidemill_scheduler.simulation.cli.files import cannot_write, check_writable
from tidemill_scheduler.simulation.cluster import MAX_SECONDS, MIN_STEP_SECONDS, check_cost

#: Fewer steps than this tell too little.
MIN_STEPS = 50

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    step_log: Annotated[
        list[Path],
        typer.Argument(help="What workers wrote that were started with --step-log FILE."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the costs here, for `tidemill simulate --cost`."
        ),
    ] = None,
) -> None:
    """Fit the cost of engine steps to the step log of a worker.

    A step takes base + per_token x tokens + per_pair x (prompt token, earlier position) pairs +
    per_context x positions that decoded tokens attend to. Log a mix of short and long prompts, so
    that the terms can be told apart: a run of the workload you mean to simulate is best.

    Example: `tidemill up -- --step-log steps.jsonl`, some load, then
    `tidemill calibrate steps.jsonl -o cost.json` and `tidemill simulate rag1 --cost cost.json`.
    """
    if output is not None:
        check_writable(output, "output")
    steps = [step for path in step_log for step in read_step_log(path)]
    cost = _fit(steps)
    Console().print(_table(cost, steps))
    if output is not None:
        _write(output, cost)


def _fit(steps: list[StepFeatures]) -> StepCost:
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"step_log: {len(steps)} steps are too few to tell what each term costs",
            fix=f"Log {MIN_STEPS} or more; a last line without its end does not count.",
        )
    timed = [step for step in steps if MIN_STEP_SECONDS <= step.seconds <= MAX_SECONDS]
    if len(timed) < MIN_STEPS:
        raise ConfigError(
            f"step_log: seconds: only {len(timed)} of {len(steps)} steps took from"
            f" {MIN_STEP_SECONDS:g} to {MAX_SECONDS:,.0f} s",
            fix=f"Log {MIN_STEPS} or more that a worker has measured.",
        )
    cost = fit_step_cost(timed)
    assert cost is not None, "some step took time"
    check_cost(cost)
    return cost


def _table(cost: StepCost, steps: list[StepFeatures]) -> Table:
    errors = sorted(abs(cost.predict(s) - s.seconds) / s.seconds for s in steps if s.seconds > 0)
    table = Table(
        title=f"Cost of a step, fitted to {len(steps):,}",
        caption=f"Median error {statistics.median(errors) * 100:.1f} % of a step,"
        f" p90 {errors[int(0.9 * (len(errors) - 1))] * 100:.1f} %.",
        # As wide as its title, so that neither breaks.
        min_width=60,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("term")
    table.add_column("us", justify="right")
    for name, value in cost.model_dump().items():
        table.add_row(name, f"{value * 1e6:.4g}")
    return table


def _write(path: Path, cost: StepCost) -> None:
    try:
        path.write_text(cost.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise cannot_write(path, "output", error) from error
