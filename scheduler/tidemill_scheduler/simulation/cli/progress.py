"""Runs policies and shows on a terminal how far they are."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from tidemill_scheduler.simulation.policies import make_policy
from tidemill_scheduler.simulation.report import Report
from tidemill_scheduler.simulation.simulator import Simulation


class _JobsProgress(Progress):
    """Asks the simulation whenever it is drawn, so that watching costs a run nothing."""

    def __init__(self, simulation: Simulation, console: Console) -> None:
        self._simulation = simulation
        self._row: TaskID | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeLeft())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._row = self.add_task("", total=None)

    def follow(self, name: str, num_jobs: int) -> None:
        """Show from now on the run of this policy."""
        if self._row is not None:
            self.reset(self._row, total=num_jobs, description=f"simulating {name}")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar as it stands."""
        if self._row is not None:
            self.update(self._row, completed=self._simulation.num_finished)
        return super().get_renderables()


def run_policies(names: list[str], simulation: Simulation, num_jobs: int) -> dict[str, Report]:
    """Simulate each policy; a bar on standard error counts the jobs that have finished."""
    reports = {}
    with _JobsProgress(simulation, Console(stderr=True)) as progress:
        for number, name in enumerate(names, 1):
            progress.follow(f"{name} ({number} of {len(names)})", num_jobs)
            reports[name] = simulation.run(make_policy(name))
    return reports
