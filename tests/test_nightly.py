"""The nightly run: every stage has its turn and its log, and one failure is a failure of all."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from support.wait import wait_until

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import nightly  # noqa: E402
from nightly import STAGES, Outcome, Stage, chosen, environment, run_stage, table  # noqa: E402


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def test_a_stage_has_its_output_in_a_log_and_its_status_in_its_outcome(tmp_path: Path) -> None:
    good = run_stage("good", sh("echo one; echo two >&2"), tmp_path / "logs", 60)
    assert good.is_good and good.result == "passed"
    assert sorted(good.log.read_text().split()) == ["one", "two"]
    bad = run_stage("bad", sh("exit 3"), tmp_path / "logs", 60)
    assert not bad.is_good and bad.result == "failed (3)"


def is_over(process_id: int) -> bool:
    """Whether a process has ended, also if nobody has asked for its status."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return "Z (zombie)" in status


def test_a_stage_that_takes_too_long_is_stopped_with_what_it_has_started(tmp_path: Path) -> None:
    script = "sleep 600 & echo $!; wait"
    late = run_stage("late", sh(script), tmp_path, 0.5)
    assert late.status is None and late.result == "took too long"
    child = int(late.log.read_text())
    wait_until(lambda: is_over(child), what="the end of what the stage has started")


def test_the_table_tells_result_last_line_and_log_of_each_stage(tmp_path: Path) -> None:
    log = tmp_path / "slow.log"
    log.write_text("begun\n5 failed, 3 passed\n\n")
    out = io.StringIO()
    Console(file=out, width=200).print(table([Outcome("slow", 2, 90.0, log)]))
    for shown in ("slow", "failed (2)", "1.5", "5 failed, 3 passed", "slow.log"):
        assert shown in out.getvalue()


@pytest.mark.parametrize(("statuses", "expected"), [((0, 0), 0), ((1, 0), 1), ((0, None), 1)])
def test_all_stages_run_whatever_became_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    statuses: tuple[int | None, ...],
    expected: int,
) -> None:
    left, ran = list(statuses), []

    def run(name: str, command: object, logs: Path, limit_seconds: float) -> Outcome:
        ran.append(name)
        log = tmp_path / f"{name}.log"
        log.write_text("")
        return Outcome(name, left.pop(0), 1.0, log)

    monkeypatch.setattr(nightly, "run_stage", run)
    monkeypatch.setattr(nightly.signal, "signal", lambda *_: None)
    assert nightly.main(["chaos", "slow", "--logs", str(tmp_path)]) == expected
    assert ran == ["slow", "chaos"]


def test_an_unknown_stage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nightly.main(["sloww"])
    assert "no stage 'sloww'" in capsys.readouterr().err


def test_stages_are_targets_of_make_and_get_arguments_of_their_own_alone() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for stage in STAGES:
        assert f"\n{stage.name}: " in makefile, stage
    assert chosen([]) == list(STAGES)
    assert Stage("chaos", "1 2 3").command[-2:] == ("chaos", "ARGS=1 2 3")
    assert environment({"ARGS": "slow", "MAKEFLAGS": "j", "PATH": "/bin"}) == {"PATH": "/bin"}
