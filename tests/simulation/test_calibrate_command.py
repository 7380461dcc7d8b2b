"""``tidemill calibrate`` in this process: the costs it finds, and the logs it refuses."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result as Outcome
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepCost, StepFeatures

Calibrate = Callable[..., Outcome]

TRUE_COST = StepCost(base=0.004, per_token=5e-5, per_pair=2e-9, per_context=1e-7)


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch) -> Calibrate:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, ["calibrate", *args])


def write_log(path: Path, num_steps: int, *, seed: int = 0) -> Path:
    """Write steps that take exactly what ``TRUE_COST`` says."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(num_steps):
            prefill, decode = rng.randrange(500), rng.randrange(1, 64)
            step = StepFeatures(
                prefill_tokens=prefill,
                decode_tokens=decode,
                prefill_pairs=prefill * rng.randrange(2000),
                context_tokens=decode * rng.randrange(50, 4000),
            )
            seconds = TRUE_COST.predict(step)
            file.write(step.model_copy(update={"seconds": seconds}).model_dump_json() + "\n")
    return path


def message_of(outcome: Outcome) -> str:
    assert isinstance(outcome.exception, ConfigError), outcome.output
    return outcome.exception.one_line()


def assert_is_true_cost(cost: StepCost) -> None:
    for name, value in TRUE_COST.model_dump().items():
        assert getattr(cost, name) == pytest.approx(value, rel=1e-6), name


def test_the_costs_behind_a_log_are_found_and_written(calibrate: Calibrate, tmp_path: Path) -> None:
    log, output = write_log(tmp_path / "steps.jsonl", 120), tmp_path / "cost.json"
    outcome = calibrate(str(log), "-o", str(output))

    assert outcome.exit_code == 0, outcome.output
    assert_is_true_cost(StepCost.model_validate_json(output.read_bytes()))
    assert "fitted to 120" in outcome.stdout and "per_context" in outcome.stdout


def test_several_logs_count_as_one(calibrate: Calibrate, tmp_path: Path) -> None:
    logs = [write_log(tmp_path / f"{n}.jsonl", 30, seed=n) for n in range(2)]
    assert "30 steps are too few" in message_of(calibrate(str(logs[0])))

    output = tmp_path / "cost.json"
    assert calibrate(*map(str, logs), "-o", str(output)).exit_code == 0
    assert_is_true_cost(StepCost.model_validate_json(output.read_bytes()))


def test_the_half_line_of_a_killed_worker_is_left_out(calibrate: Calibrate, tmp_path: Path) -> None:
    log, output = write_log(tmp_path / "steps.jsonl", 80), tmp_path / "cost.json"
    log.write_text(log.read_text() + '{"prefill_tokens": 12, "dec')

    outcome = calibrate(str(log), "-o", str(output))
    assert outcome.exit_code == 0, outcome.output
    assert "fitted to 80" in outcome.stdout
    assert_is_true_cost(StepCost.model_validate_json(output.read_bytes()))


@pytest.mark.parametrize("line", ['{"prefill_tokens": 12, "dec', "[]", '{"prefill_tokens": -1}'])
def test_a_bad_line_within_a_log_is_refused_with_its_number(
    calibrate: Calibrate, tmp_path: Path, line: str
) -> None:
    log = write_log(tmp_path / "steps.jsonl", 60)
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:7], line, *lines[7:]]))
    assert f"{log}, line 8: this is not a step" in message_of(calibrate(str(log)))


def test_a_log_that_is_not_there_is_refused(calibrate: Calibrate, tmp_path: Path) -> None:
    message = message_of(calibrate(str(tmp_path / "none.jsonl")))
    assert "none.jsonl cannot be read" in message


@pytest.mark.parametrize("num_steps", [0, 49])
def test_too_few_steps_are_refused(calibrate: Calibrate, tmp_path: Path, num_steps: int) -> None:
    log = write_log(tmp_path / "steps.jsonl", num_steps)
    assert f"{num_steps} steps are too few" in message_of(calibrate(str(log)))


@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e300])
def test_steps_that_took_no_time_or_years_tell_nothing(
    calibrate: Calibrate, tmp_path: Path, seconds: float
) -> None:
    log, output = tmp_path / "steps.jsonl", tmp_path / "cost.json"
    step = StepFeatures(prefill_tokens=5, seconds=seconds)
    log.write_text((step.model_dump_json() + "\n") * 60)
    message = message_of(calibrate(str(log), "-o", str(output)))
    assert "step_log: seconds: only 0 of 60 steps took from 1e-09 to 3,600 s" in message
    assert not output.exists()


def test_one_line_without_its_end_is_no_step(calibrate: Calibrate, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("this is no log")
    message = message_of(calibrate(str(log)))
    assert "0 steps are too few" in message and "without its end does not count" in message


def test_an_output_that_cannot_be_written_is_refused(calibrate: Calibrate, tmp_path: Path) -> None:
    log = write_log(tmp_path / "steps.jsonl", 60)
    message = message_of(calibrate(str(log), "-o", str(tmp_path / "missing" / "cost.json")))
    assert "cannot be written" in message


def test_an_output_that_cannot_be_written_is_told_before_logs_are_read(
    calibrate: Calibrate, tmp_path: Path
) -> None:
    message = message_of(calibrate(str(tmp_path / "none.jsonl"), "-o", str(tmp_path)))
    assert message.startswith("output:") and "is not a file" in message


def test_a_refused_log_leaves_the_costs_of_before(calibrate: Calibrate, tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    output.write_text("{}")
    message_of(calibrate(str(tmp_path / "none.jsonl"), "-o", str(output)))
    assert output.read_text() == "{}"
