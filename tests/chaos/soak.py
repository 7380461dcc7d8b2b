"""Many runs one after the other: ``python -m chaos.soak``; totals are kept in a JSON-lines file."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.plan import make_plan
from chaos.run import Report, perform, print_report
from chaos.stage import StageOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seed after seed until a total is reached; 0 if every promise was kept."""
    given = _parse(arguments)
    given.record.parent.mkdir(parents=True, exist_ok=True)
    seed, failed = given.first_seed, 0
    while not _is_reached(totals(given.record), given.jobs, given.kills):
        plan = make_plan(seed, given.round_jobs, given.round_seconds)
        directory = Path(tempfile.mkdtemp(prefix=f"tidemill-soak-{seed}-", dir=given.scratch))
        try:
            report = perform(plan, directory, StageOptions(fsync=given.fsync), quiet=True)
        except Exception:
            # The outermost loop: a run that could not be judged counts for nothing but a failure.
            traceback.print_exc()
            print(f"seed {seed} could not be judged; its record is in {directory}", flush=True)
            failed, seed = failed + 1, seed + 1
            continue
        print_report(report)
        with given.record.open("a") as record:
            record.write(json.dumps(row_of(report, given.fsync)) + "\n")
        print(table(totals(given.record)), flush=True)
        failed += bool(report.violations)
        if report.violations:
            print(f"the record of the failed run is in {directory}")
            if given.stop:
                break
        else:
            shutil.rmtree(directory)
        seed += 1
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos.soak", description=__doc__)
    parser.add_argument("--record", type=Path, default=Path("soak.jsonl"), help="the totals so far")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=200_000, help="go on until so many")
    parser.add_argument("--kills", type=int, default=2_000, help="and so many")
    parser.add_argument("--round-jobs", type=int, default=8_000)
    parser.add_argument("--round-seconds", type=float, default=80.0)
    parser.add_argument("--fsync", default="always", choices=("always", "everysec", "no"))
    parser.add_argument("--scratch", type=Path, help="where the runs keep their data")
    parser.add_argument("--stop", action="store_true", help="stop at the first failed run")
    return parser.parse_args(arguments)


def _is_reached(total: Counter[str], jobs: int, kills: int) -> bool:
    return total["accepted"] >= jobs and total["kills"] >= kills


def row_of(report: Report, fsync: str) -> dict[str, Any]:
    """What is kept of a run."""
    measures = report.measures
    return {
        "seed": report.plan.seed,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": _revision(),
        "fsync": fsync,
        "accepted": measures.num_accepted,
        "tokens": measures.num_tokens,
        "subscribers": measures.num_followed,
        "kills": report.num_kills,
        "seconds": round(report.seconds, 1),
        "violations": [str(violation) for violation in report.violations[:50]],
        "num_violations": len(report.violations),
        "counts": report.counts,
        "states": dict(measures.states),
        "takeover_max": round(max(measures.takeover, default=0.0), 2),
        "failover_max": round(max(measures.failover, default=0.0), 2),
    }


def _revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def totals(record: Path) -> Counter[str]:
    """The sums of a record file."""
    total: Counter[str] = Counter()
    for line in record.read_text().splitlines() if record.exists() else []:
        row = json.loads(line)
        total["runs"] += 1
        for name in ("accepted", "tokens", "subscribers", "kills", "seconds", "num_violations"):
            total[name] += row[name]
        total.update(row["counts"])
        total.update({f"ended {state}": n for state, n in row["states"].items()})
    return total


def table(total: Counter[str]) -> str:
    """The totals, one a line."""
    rate = total["accepted"] / max(1, total["seconds"])
    head = (
        f"TOTAL {total['runs']} runs, {total['accepted']} jobs, {total['kills']} kills,"
        f" {total['tokens']} tokens, {total['subscribers']} subscribers,"
        f" {total['num_violations']} violations, {rate:.0f} jobs/s"
    )
    rest = sorted(name for name in total if " " in name)
    return head + "".join(f"\n  {name:24} {total[name]:8}" for name in rest)


if __name__ == "__main__":
    sys.exit(main())
