"""Steps go to a file and come back, whatever became of their worker."""

import logging
from pathlib import Path

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepFeatures
from tidemill.service.step_log import StepLog, read_step_log

STEPS = [
    StepFeatures(prefill_tokens=n, decode_tokens=3, prefill_pairs=n * n, seconds=0.1 / (n + 1))
    for n in range(5)
]


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with StepLog(path) as log:
        for step in STEPS:
            log.write(step)
    assert read_step_log(path) == STEPS


def test_each_step_is_in_the_file_at_once_and_a_second_worker_appends(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    first = StepLog(path)
    first.write(STEPS[0])
    with StepLog(path) as second:
        second.write(STEPS[1])
        assert read_step_log(path) == STEPS[:2]
    first.close()


def test_the_line_a_killed_worker_did_not_end_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = STEPS[3].model_dump_json()
    path.write_text(line + "\n" + line[:10])
    assert read_step_log(path) == [STEPS[3]]
    path.write_text(line[:10])
    assert read_step_log(path) == []


def test_a_line_that_is_no_step_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(STEPS[3].model_dump_json() + "\n{}\n[]\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_step_log(path)


def test_a_file_that_cannot_be_opened_or_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "steps.jsonl"
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be opened"):
        StepLog(path)
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        read_step_log(path)


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for step in STEPS:
            log.write(step)
    assert len(caplog.records) == 1
    log.close()
