"""One run: ``python -m chaos.run SEED JOBS SECONDS`` from ``tests``; see ``--help``."""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from chaos.checker import check
from chaos.faults import Injector
from chaos.measures import Measures, measure
from chaos.plan import FAULTS, NUM_PRODUCERS, Plan, make_plan
from chaos.stage import Stage, StageOptions
from chaos.truth import dump, is_idle
from chaos.verdict import Run, Violation

#: How long everything may take to come to rest once nothing breaks any more.
REST_SECONDS = 90.0
_TURN_SECONDS = 0.02
_PROGRESS_SECONDS = 1.0


@dataclass
class Report:
    """What came of a run."""

    plan: Plan
    seconds: float
    counts: dict[str, int]
    measures: Measures
    violations: list[Violation] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        """Deaths by SIGKILL and at crash points."""
        return sum(n for cause, n in self.counts.items() if cause.split()[0] in ("kill", "crash"))


def perform(plan: Plan, directory: Path, options: StageOptions, *, quiet: bool = False) -> Report:
    """Carry a plan out, record it in ``directory`` and judge it."""
    begun = time.monotonic()
    stage = Stage(plan, directory, options)
    try:
        _play(stage, quiet)
        _write_truth(stage)
        for name, status in stage.close().items():
            stage.recorder.record("left", name=name, status=status)
    finally:
        stage.close()
        stage.end()
    run = Run.load(directory, plan)
    return Report(plan, time.monotonic() - begun, dict(stage.counts), measure(run), check(run))


def _play(stage: Stage, quiet: bool) -> None:
    injector = Injector(stage)
    stage.open()
    shown = 0.0
    end = stage.started + stage.plan.seconds
    while time.monotonic() < end or not injector.is_done:
        injector.turn()
        stage.supervise()
        if not quiet and time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            _show(stage)
        time.sleep(_TURN_SECONDS)
    injector.close()
    _await_rest(stage)


def _await_rest(stage: Stage) -> None:
    deadline = time.monotonic() + REST_SECONDS
    with stage.brokers.connect() as client:
        while len(stage.finished) < NUM_PRODUCERS or not _is_idle(client):
            stage.supervise()
            if time.monotonic() > deadline:
                why = f"{NUM_PRODUCERS - len(stage.finished)} producers still work"
                stage.recorder.record("stuck", why=why)
                return
            time.sleep(_TURN_SECONDS)


def _is_idle(client: redis.Redis) -> bool:
    try:
        return is_idle(client)
    except redis.RedisError:
        return False


def _write_truth(stage: Stage) -> None:
    with stage.brokers.connect() as client:
        dump(client).save(stage.directory / "truth.msgpack")


def _show(stage: Stage) -> None:
    elapsed = time.monotonic() - stage.started
    share = min(1.0, max(0.0, elapsed / stage.plan.seconds))
    bar = "#" * round(30 * share)
    kills = sum(n for cause, n in stage.counts.items() if cause.split()[0] in ("kill", "crash"))
    sys.stderr.write(f"\r[{bar:30}] {max(0.0, elapsed):5.0f} s, {kills} kills ")
    sys.stderr.flush()


def print_report(report: Report) -> None:
    """Tell a run in a few lines, and how to repeat it if it failed."""
    plan = report.plan
    jobs = len(plan.jobs)
    print(
        f"\nseed {plan.seed}: {jobs} jobs in {report.seconds:.1f} s"
        f" ({jobs / report.seconds:.0f}/s), {report.num_kills} kills"
    )
    print("  " + ", ".join(f"{cause} {n}" for cause, n in sorted(report.counts.items())))
    for line in report.measures.lines():
        print(f"  {line}")
    for violation in report.violations[:20]:
        print(f"  VIOLATED {violation}")
    if report.violations:
        broken = sorted({violation.invariant for violation in report.violations})
        print(f"  {len(report.violations)} violations of {', '.join(broken)}; replay with:")
        print(f"  python -m chaos.run {plan.seed} {jobs} {plan.seconds:g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once; 0 if every promise was kept, 1 if not."""
    parser = argparse.ArgumentParser(prog="chaos.run", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("jobs", type=int, nargs="?", default=1500)
    parser.add_argument("seconds", type=float, nargs="?", default=24.0)
    parser.add_argument("--faults", default=",".join(FAULTS), help="which ones; empty: none")
    parser.add_argument("--keep", type=Path, help="keep the record in this directory")
    parser.add_argument("--patch", default="", help="module that plants a bug in every process")
    parser.add_argument("--library", default="", help="another function library, a Lua file")
    parser.add_argument("--fsync", default="always", choices=("always", "everysec", "no"))
    parser.add_argument("--gap", type=float, default=0.6, help="mean seconds between faults")
    parser.add_argument("--replica", action="store_true", help="with a replica; for promote")
    parser.add_argument("--data-dir", type=Path, help="the broker's; a small disk for fill_disk")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    given = parser.parse_args(arguments)
    faults = [name for name in given.faults.split(",") if name]
    plan = make_plan(given.seed, given.jobs, given.seconds, faults, given.gap)
    options = StageOptions(
        patch=given.patch,
        library=given.library,
        fsync=given.fsync,
        has_replica=given.replica,
        data_dir=given.data_dir,
    )
    directory = given.keep or Path(tempfile.mkdtemp(prefix="tidemill-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    report = perform(plan, directory, options, quiet=given.quiet)
    print_report(report)
    if given.keep is None and not report.violations:
        shutil.rmtree(directory)
    else:
        print(f"  the record is in {directory}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
