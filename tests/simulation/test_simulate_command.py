"""``tidemill simulate`` in this process: what it prints, writes and refuses."""

import importlib.util
import json
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import Result as Outcome
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.protocol.errors import ConfigError, InvalidRequest, TidemillError
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.simulation.policies import POLICIES

Simulate = Callable[..., Outcome]

SMALL = ("eval57", "--scale", "0.01", "--workers", "2")


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, ["simulate", *args])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three jobs in Mooncake's format; the second one has the first one's prompt and more."""
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 8000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 16000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def reports_of(outcome: Outcome) -> dict[str, dict[str, object]]:
    assert outcome.exit_code == 0, outcome.output
    lines = [json.loads(line) for line in outcome.stdout.splitlines()]
    return {line["policy"]: line["report"] for line in lines}


def error_of(outcome: Outcome) -> TidemillError:
    assert isinstance(outcome.exception, TidemillError), outcome.output
    return outcome.exception


def test_a_trace_is_replayed_and_its_prefixes_are_found(simulate: Simulate, trace: Path) -> None:
    [report] = reports_of(
        simulate(str(trace), "--online", "--policy", "tidemill", "--json")
    ).values()

    # The second job finds the first one's 1,024 tokens.
    assert report["num_jobs"] == report["num_finished"] == 3
    assert report["input_tokens"] == 1024 + 1600 + 600
    assert report["hit_tokens"] == 1024
    assert 16 < float(str(report["makespan"])) < 17


def test_load_lets_jobs_come_faster(simulate: Simulate, trace: Path) -> None:
    command = (str(trace), "--online", "--load", "4", "--policy", "fifo", "--json")
    [report] = reports_of(simulate(*command)).values()
    assert 4 < float(str(report["makespan"])) < 5


def test_without_policies_ours_and_fifo_are_compared_in_a_table(simulate: Simulate) -> None:
    outcome = simulate(*SMALL)
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert "eval57" in lines[0] and "2 workers" in lines[0]
    rows = {line.split()[1] for line in lines if line.startswith("│")}
    assert rows == {"tidemill", "fifo"}


def test_all_means_every_policy_and_none_is_run_twice(simulate: Simulate) -> None:
    assert list(reports_of(simulate(*SMALL, "--policy", "all", "--json"))) == list(POLICIES)
    command = (*SMALL, "--policy", "fifo", "--policy", "fifo", "--json")
    assert list(reports_of(simulate(*command))) == ["fifo"]


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(simulate: Simulate) -> None:
    first, again, other = (simulate(*SMALL, "--json", "--seed", seed).stdout for seed in "112")
    assert first == again
    assert first != other


def test_the_same_plot_is_the_same_file(simulate: Simulate, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        assert simulate(*SMALL, "--plot", str(file)).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"<svg" in files[0].read_bytes()


def test_step_costs_come_from_a_file(simulate: Simulate, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    default = StepCost()
    doubled = {name: 2 * value for name, value in default.model_dump().items()}
    cost.write_text(StepCost(**doubled).model_dump_json())

    command = (*SMALL, "--policy", "fifo", "--json")
    [plain] = reports_of(simulate(*command)).values()
    [slow] = reports_of(simulate(*command, "--cost", str(cost))).values()
    assert float(str(slow["makespan"])) == pytest.approx(2 * float(str(plain["makespan"])))


def test_a_trace_that_is_not_there_is_refused(simulate: Simulate, tmp_path: Path) -> None:
    error = error_of(simulate(str(tmp_path / "none.jsonl")))
    assert isinstance(error, ConfigError)
    assert "none.jsonl" in str(error) and "rag1" in error.one_line()


def test_an_unknown_suffix_is_refused(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1")
    assert "'.parquet'" in str(error_of(simulate(str(path))))


@pytest.mark.parametrize(
    "line",
    ['{"timestamp": 1, "input_length": 5', '{"timestamp": 1}', "[]", '{"timestamp": 1, "in', "5"],
)
def test_half_a_line_is_refused_with_its_number(simulate: Simulate, trace: Path, line: str) -> None:
    trace.write_text(trace.read_text() + line)
    message = str(error_of(simulate(str(trace))))
    assert "line 4" in message and trace.name in message


def test_an_unknown_policy_is_refused_before_anything_runs(
    simulate: Simulate, tmp_path: Path
) -> None:
    error = error_of(simulate(str(tmp_path / "none.jsonl"), "--policy", "best"))
    assert isinstance(error, InvalidRequest)
    assert "'best'" in str(error) and "dynamo-style" in error.one_line()


def test_made_up_workloads_have_no_times_to_come_at(simulate: Simulate) -> None:
    error = error_of(simulate(*SMALL, "--online"))
    assert "does not say when" in str(error)


def test_a_cache_that_holds_no_prompt_is_refused(simulate: Simulate, trace: Path) -> None:
    assert "kv_tokens" in str(error_of(simulate(str(trace), "--kv-tokens", "512")))


def test_step_costs_that_are_none_are_refused(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"base": -1}')
    assert "cost.json" in str(error_of(simulate(*SMALL, "--cost", str(path))))
    assert "none.json" in str(error_of(simulate(*SMALL, "--cost", str(tmp_path / "none.json"))))


@pytest.mark.parametrize(
    ("name", "message"), [("chart.txt", "'.txt'"), ("missing/chart.svg", "no directory")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_runs(
    simulate: Simulate, tmp_path: Path, name: str, message: str
) -> None:
    error = error_of(simulate(str(tmp_path / "none.jsonl"), "--plot", str(tmp_path / name)))
    assert message in str(error)


def test_without_matplotlib_a_plot_is_refused_with_what_to_install(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "matplotlib" else importlib.util.find_spec(name)

    monkeypatch.setattr("tidemill_scheduler.simulation.cli.plot.find_spec", find)
    error = error_of(simulate(*SMALL, "--plot", str(tmp_path / "chart.svg")))
    assert "matplotlib" in str(error) and "tidemill[plots]" in error.one_line()
    assert not (tmp_path / "chart.svg").exists()


@pytest.mark.parametrize(
    "options", [("--workers", "0"), ("--load", "0"), ("--scale", "2"), ("--tpot-slo-ms", "-1")]
)
def test_numbers_out_of_range_are_usage_errors(
    simulate: Simulate, options: tuple[str, str]
) -> None:
    outcome = simulate("eval57", *options)
    assert outcome.exit_code == 2
    assert options[0] in outcome.stderr
