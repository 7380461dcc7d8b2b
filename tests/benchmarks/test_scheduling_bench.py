"""The scheduling benchmark in its quick size: it runs, and what it says holds together."""

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from scheduling import QUICK_SCALE, parse_arguments
from scheduling_figures import Results, Scope
from scheduling_mixed import MIXED
from scheduling_runs import simulate

pytestmark = pytest.mark.timeout(300)

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "scheduling.py"
CELLS = ["rag", "overload", "fair", "death", "same"]


def write_trace(path: Path, num_jobs: int, seed: int) -> None:
    """Conversations of a few turns in Mooncake's format: each turn repeats what was said before."""
    rng, next_id = random.Random(seed), 0
    talks: list[list[int]] = []
    with path.open("w") as file:
        for number in range(num_jobs):
            talk = rng.choice(talks) if talks and rng.random() < 0.6 else []
            new = list(range(next_id, next_id + rng.randint(2, 8)))
            next_id += len(new)
            talks.append(talk + new)
            line = {
                "timestamp": 300 * number,
                "input_length": 512 * len(talks[-1]),
                "output_length": rng.randint(1, 60),
                "hash_ids": talks[-1],
            }
            file.write(json.dumps(line) + "\n")


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traces")
    for seed, name in enumerate(("conversation", "synthetic")):
        write_trace(directory / f"{name}_trace.jsonl", 2000, seed)
    return directory


@pytest.fixture(scope="module")
def written(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory into which one run has written its figures and its chart."""
    directory = tmp_path_factory.mktemp("figures")
    files = ["--json", str(directory / "figures.json"), "--plot", str(directory / "chart.svg")]
    done = run_program("--quick", "--only", *CELLS, "--traces", str(traces), *files)
    assert done.returncode == 0, done.stderr
    assert "targets met" in done.stdout
    return directory


@pytest.fixture(scope="module")
def figures(written: Path) -> Any:
    return json.loads((written / "figures.json").read_text())


def runs_of(figures: Any, cell: str) -> Any:
    [by_label] = figures["runs"][cell]
    return {label: outcome["report"] for label, outcome in by_label.items()}


def figure_of(figures: Any, cell: str, start: str) -> Any:
    return next(f for f in figures["figures"][cell] if f["what"].startswith(start))


def test_only_the_cells_asked_for_are_measured(figures: Any) -> None:
    assert sorted(figures["runs"]) == sorted(figures["figures"]) == sorted(CELLS)


def test_all_policies_meet_the_same_jobs(figures: Any) -> None:
    runs = runs_of(figures, "rag")
    assert {"tidemill", "fifo", "dynamo-style", "sglang-style", "lmetric-style"} <= runs.keys()
    assert len({(run["num_jobs"], run["input_tokens"]) for run in runs.values()}) == 1
    for run in runs.values():
        assert run["num_finished"] == run["num_jobs"] == 400
        assert 0 <= run["hit_share"] <= run["bound_share"]


def test_a_verdict_is_that_of_the_worst_seed(figures: Any) -> None:
    for found in figures["figures"].values():
        for figure in found:
            lower, upper = figure["at_least"], figure["at_most"]
            is_met = figure["is_met"]
            if lower is None and upper is None:
                assert is_met is None
            elif lower is not None:
                assert is_met == all(value >= lower for value in figure["values"])
            else:
                assert is_met == all(value <= upper for value in figure["values"])


def test_figures_are_those_of_the_runs(figures: Any) -> None:
    runs = runs_of(figures, "rag")
    ratio = runs["dynamo-style"]["makespan"] / runs["tidemill"]["makespan"]
    assert figure_of(figures, "rag", "makespan")["values"] == [pytest.approx(ratio)]

    fair = figure_of(figures, "fair", "service gap")
    assert fair["values"] == [runs_of(figures, "fair")["tidemill"]["service_gap"]]
    assert fair["at_most"] == 5 * 8192


def test_a_dead_worker_costs_work_and_no_job(figures: Any) -> None:
    runs = runs_of(figures, "death")
    for trace in ("conversation", "synthetic"):
        dead, alive = runs[f"{trace}, one of 8 dies at T/3"], runs[f"{trace}, all live"]
        assert dead["num_finished"] == alive["num_finished"] == alive["num_jobs"]
        assert dead["num_requeued"] > 0 == alive["num_requeued"]


# In this process: to start one for each of fifteen runs takes longer than to make them.
@pytest.mark.parametrize("num_runs", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_bulk_beside_online_jobs_has_a_rate_and_online_jobs_alone_have_none(
    traces: Path, num_runs: int | None
) -> None:
    specs = MIXED.runs(0, Scope((0,), QUICK_SCALE, False))
    outcomes = {label: simulate(spec, traces) for label, spec in islice(specs.items(), num_runs)}
    rates = {label: outcome.bulk_rate for label, outcome in outcomes.items()}
    assert {label.rpartition(": ")[2] for label in rates} > {"online alone", "with FIFO bulk"}
    assert all((rate == 0) == label.endswith("online alone") for label, rate in rates.items())
    first = MIXED.figures(Results([outcomes]))[0]
    _, fifo, prefix = rates.values() if num_runs else islice(rates.values(), 3)
    assert first.values == (prefix / fifo,)


def test_two_processes_give_the_same_bytes(figures: Any) -> None:
    [by_label] = figures["runs"]["same"]
    digests = [outcome["digest"] for outcome in by_label.values()]
    assert digests[0::2] == digests[1::2]
    assert len(set(digests)) == 2
    assert figure_of(figures, "same", "reports that differ")["is_met"]


def test_the_chart_is_drawn_from_what_was_measured(written: Path) -> None:
    chart = (written / "chart.svg").read_text()
    assert "<svg" in chart and len(chart) > 10_000


def test_files_of_earlier_runs_are_shown_together_without_running_anything(
    written: Path, figures: Any, tmp_path: Path
) -> None:
    for cell in ("rag", "overload"):
        part = {"runs": {cell: figures["runs"][cell]}}
        (tmp_path / f"{cell}.json").write_text(json.dumps(part))
    files = [str(tmp_path / f"{cell}.json") for cell in ("rag", "overload")]
    chart, again = tmp_path / "chart.svg", tmp_path / "again.json"
    done = run_program(
        "--from", *files, "--traces", "/nowhere", "--plot", str(chart), "--json", str(again)
    )
    assert done.returncode == 0, done.stderr
    assert chart.read_bytes() == (written / "chart.svg").read_bytes()
    for part in ("runs", "figures"):
        told = json.loads(again.read_text())[part]
        assert told == {cell: figures[part][cell] for cell in ("rag", "overload")}


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"runs": {"rag": [{"tidemill": {}}]}}'])
def test_a_file_that_no_run_wrote_is_refused(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    if text is not None:
        path.write_text(text)
    assert f"{path} is no file that --json wrote" in refusal(capsys, "--from", str(path))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the program says of these arguments before it ends."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code != 0
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nothing"), "invalid choice: 'nothing'"),
        (("--seeds", "0"), "1 or more"),
        (("--processes", "0"), "1 or more"),
        (("--quick", "--only", "same", "--traces", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


def test_a_refusal_ends_the_program_before_it_runs_anything() -> None:
    done = run_program("--seeds", "0")
    assert done.returncode != 0
    assert done.stdout == ""
