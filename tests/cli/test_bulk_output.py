"""The output file of a bulk run."""

import json
import subprocess
import sys
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


@pytest.mark.parametrize("content", ["# Notes\n", '{"prompt": "hi"}\n', "[1]\n", "\n"])
def test_a_file_that_is_no_output_of_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(json.dumps(row(1, text="a", error=None)) + "\n" + content)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="line 2"), open_output(path):
        pass
    assert path.read_bytes() == before


def test_the_input_is_not_taken_for_the_output(tmp_path: Path) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    source.write_text('{"prompt": "hi"}\n')
    link.symlink_to(source)
    with pytest.raises(ConfigError, match="input itself"), open_output(link, source):
        pass
    assert source.read_text() == '{"prompt": "hi"}\n'


def test_a_run_keeps_its_id_over_stops_and_a_new_run_gets_another(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ids = []
    for _ in range(2):
        with open_output(path) as output:
            ids.append(output.run_id)
    output.complete()
    with open_output(path) as output:
        ids.append(output.run_id)
    assert ids[0] == ids[1] != ids[2]


def test_a_file_being_cleaned_cannot_be_taken_by_another_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path) as output:
        output.write(row(1, error="no"))
    with (
        open_output(path) as output,
        pytest.raises(ConfigError, match="another run"),
        open_output(path),
    ):
        pass


_FILL = """
import resource, sys
from pathlib import Path
from tidemill.cli.bulk_output import open_output
from tidemill.protocol.errors import ConfigError
try:
    with open_output(Path(sys.argv[1])) as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        while True:
            output.write({"custom_id": "a", "line": 1, "job_id": "j", "error": None})
except ConfigError as error:
    print(error.one_line())
"""


def test_an_output_that_can_grow_no_more_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", _FILL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(path) in done.stdout and "too large" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("path", ["/dev/full", "/tmp"])
def test_a_device_or_a_directory_is_no_output(path: str) -> None:
    with pytest.raises(ConfigError, match="no file"), open_output(Path(path)):
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
