"""The output file of a bulk run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.bulk_output import open_output
from tidemill.protocol.errors import ConfigError


def row(number: int, **fields: Any) -> dict[str, Any]:
    return {"custom_id": f"id-{number}", "line": number, "job_id": f"job-{number}", **fields}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_earlier_runs_lines_are_kept_and_known(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path) as output:
        output.write(row(1, text="a", error=None))
    with open_output(path) as output:
        assert output.done == {(1, "id-1")}
        output.write(row(2, text="b", error=None))
    assert [r["line"] for r in lines(path)] == [1, 2]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(row(1, text="a", error=None)) + '\n{"custom_id": "id-2", "li')
    with open_output(path) as output:
        assert output.done == {(1, "id-1")}
        output.write(row(2, text="b", error=None))
    assert [r["line"] for r in lines(path)] == [1, 2]


def test_a_failed_line_is_dropped_and_its_job_remembered(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path) as output:
        output.write(row(1, error="no"))
        output.write(row(2, text="b", error=None))
    with open_output(path) as output:
        assert output.done == {(2, "id-2")}
        assert output.retries == {(1, "id-1"): "job-1"}
    assert [r["line"] for r in lines(path)] == [2]


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path), pytest.raises(ConfigError, match="another run"), open_output(path):
        pass


def test_an_unwritable_output_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        open_output(tmp_path / "no" / "out.jsonl"),
    ):
        pass


def test_any_text_that_json_can_hold_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path) as output:
        output.write({**row(1, text="é\u2028\x00", error=None), "custom_id": "\ud800"})
    with open_output(path) as output:
        assert output.done == {(1, "\ud800")}
