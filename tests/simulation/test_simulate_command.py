"""``tidemill simulate`` in this process: what it prints, writes and refuses."""

import errno
import importlib.util
import json
import math
import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Outcome
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.protocol.errors import ConfigError, InvalidRequest, TidemillError
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.simulation.cluster import Cluster
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


COSTS = {"base": 0.006, "per_token": 3e-5, "per_pair": 1e-9, "per_context": 5e-8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no field base"),
        (json.dumps({"base": 0.006}), "has no field per_token"),
        (json.dumps(COSTS | {"base": -1}), "base in .* is not a number from 0 to 3,600 s"),
        (json.dumps(COSTS | {"per_pair": 1e300}), "per_pair in .* from 0 to 3,600 s"),
        (json.dumps(COSTS | {"per_context": float("nan")}), "per_context in .* from 0 to 3,600 s"),
        (json.dumps(COSTS | {"per_token": "3"}), "per_token in .* from 0 to 3,600 s"),
        (json.dumps(COSTS | {"base": True}), "base in .* from 0 to 3,600 s"),
        (json.dumps(COSTS | {"per_toke": 1}), "unknown field 'per_toke'"),
        (json.dumps(dict.fromkeys(COSTS, 0)), r"base \+ per_token \+ per_context.* below 1e-09 s"),
        (json.dumps(dict.fromkeys(COSTS, 0) | {"per_pair": 1}), "below 1e-09 s"),
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ("\udcff", "not JSON"),
    ],
)
def test_step_costs_that_are_none_are_refused_in_one_short_line(
    simulate: Simulate, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, errors="surrogateescape")
    error = error_of(simulate(str(tmp_path / "none.jsonl"), "--cost", str(path)))
    assert isinstance(error, ConfigError)
    assert re.search(f"^cost: .*{message}", error.one_line())
    assert len(error.one_line().replace(str(path), "")) < 160


def test_step_costs_that_cannot_be_read_are_refused(simulate: Simulate, tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        error = error_of(simulate(*SMALL, "--cost", str(path)))
        assert f"cost: {path} cannot be read" in str(error)


@pytest.mark.parametrize("name", ["base", "per_token", "per_context"])
def test_a_step_may_cost_one_thing_alone(simulate: Simulate, tmp_path: Path, name: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(dict.fromkeys(COSTS, 0) | {name: 1e-3}))
    for report in reports_of(simulate(*SMALL, "--json", "--cost", str(path))).values():
        assert report["num_finished"] == report["num_jobs"]


@pytest.mark.parametrize(
    ("name", "message"), [("chart.txt", "'.txt'"), ("missing/chart.svg", "no directory")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_runs(
    simulate: Simulate, tmp_path: Path, name: str, message: str
) -> None:
    error = error_of(simulate(str(tmp_path / "none.jsonl"), "--plot", str(tmp_path / name)))
    assert message in str(error)


@pytest.mark.parametrize("kind", ["directory", "loop"])
def test_a_plot_where_no_file_can_be_is_refused_before_anything_runs(
    simulate: Simulate, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.svg"
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path)
    error = error_of(simulate(str(tmp_path / "none.jsonl"), "--plot", str(path)))
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"plot: {path} ")


def test_a_disk_that_fills_up_meanwhile_is_told_in_one_line(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", fail)
    path = tmp_path / "chart.svg"
    error = error_of(simulate(*SMALL, "--plot", str(path)))
    assert f"plot: {path} cannot be written: No space left on device" in str(error)


def test_a_plot_that_comes_to_nothing_leaves_no_file(simulate: Simulate, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    error_of(simulate(str(tmp_path / "none.jsonl"), "--plot", str(tmp_path / "chart.svg")))
    assert not (tmp_path / "chart.svg").exists()


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
    ("option", "value", "limit"),
    [
        ("--workers", "0", "1"),
        ("--load", "0", "0.001"),
        ("--load", "inf", "1000000"),
        ("--load", "nan", "1000000"),
        ("--scale", "2", "1"),
        ("--scale", "nan", "1"),
        ("--tpot-slo-ms", "-1", "0"),
        ("--tpot-slo-ms", "inf", "3600000"),
        ("--rtt-ms", "nan", "3600000"),
        ("--rtt-ms", "1e300", "3600000"),
        ("--kv-tokens", "9" * 30, "1000000000000"),
        ("--step-tokens", "9" * 30, "100000000"),
    ],
)
def test_numbers_out_of_range_are_usage_errors_that_name_the_limit(
    simulate: Simulate, option: str, value: str, limit: str
) -> None:
    outcome = simulate("eval57", option, value)
    assert outcome.exit_code == 2
    assert f"'{option}'" in outcome.stderr and f"equal to {limit} " in outcome.stderr


@pytest.mark.parametrize("name", ["", ".", "x" * 5000, "nul\0byte.jsonl"])
def test_a_name_that_no_trace_can_have_is_refused(simulate: Simulate, name: str) -> None:
    assert "neither a file nor a made-up workload" in str(error_of(simulate(name)))


@pytest.mark.parametrize("online", [(), ("--online",)])
def test_the_table_of_all_policies_fits_into_80_columns(
    simulate: Simulate, trace: Path, monkeypatch: pytest.MonkeyPatch, online: tuple[str, ...]
) -> None:
    command = (str(trace), "--policy", "all", *online)
    wide = simulate(*command).stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = simulate(*command).stdout

    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    assert rows_of(narrow) == rows_of(wide)
    assert [row[0] for row in rows_of(narrow)] == list(POLICIES)


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_table_of_very_long_times_fits_too(
    simulate: Simulate, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COSTS | {"base": 300}))
    outcome = simulate(str(trace), "--policy", "all", "--online", "--cost", str(cost))
    assert outcome.exit_code == 0 and "…" not in outcome.stdout


def test_a_bar_on_a_terminal_shows_how_far_each_policy_is(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulate(*SMALL, "--json").stderr == ""

    monkeypatch.setenv("FORCE_COLOR", "1")
    outcome = simulate(*SMALL, "--json")
    assert set(reports_of(outcome)) == {"tidemill", "fifo"}
    assert "simulating fifo (2 of 2)" in outcome.stderr and "100%" in outcome.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_tokens": 10**400}, "kv_tokens: it is above 1,000,000,000,000"),
        ({"step_tokens": 10**9}, "step_tokens: it is above 100,000,000"),
        ({"rtt_seconds": math.nan}, "rtt_seconds: nan is no duration from 0 to 3,600 s"),
        ({"tpot_slo_seconds": 1e297}, "tpot_slo_seconds: 1e+297 is no duration"),
        ({"cost": StepCost(base=4000)}, "cost: base: 4000 is not from 0 to 3,600 s"),
        ({"cost": StepCost(base=0, per_token=0, per_context=0)}, "below 1e-09 s"),
    ],
)
def test_a_cluster_from_python_has_the_same_bounds(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Cluster(1, **changes)
