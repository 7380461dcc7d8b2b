"""The perplexity benchmark: windows, figures, and runs that are gone on with."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from perplexity_rows import (
    Record,
    Row,
    RowKey,
    cut,
    largest_difference,
    make_table,
    score_missing,
)
from rich.console import Console

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "perplexity.py"
SETTING = {"model": "m", "window_tokens": 4}
KEY = RowKey("tidemill", "int8")
WINDOWS = [[number, number + 1, number + 2] for number in range(20)]


def test_windows_lie_one_behind_the_other_and_are_full() -> None:
    assert cut(range(11), 2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut(range(11), 9, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_all_windows_reach_to_the_end_of_the_text() -> None:
    assert cut(range(11), None, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    # In a window of one token nothing is predicted.
    assert cut(range(9), None, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_text_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens, too few for a window of 4"):
        cut(range(3), 1, 4)


def test_guessing_among_n_tokens_has_perplexity_n() -> None:
    lengths = [4, 4, 3]
    row = Row(KEY, [(length - 1) * math.log(50) for length in lengths])

    assert row.perplexity(lengths) == pytest.approx(50)
    # Windows that were scored beyond those asked for do not count.
    row.sums.append(1e6)
    assert row.perplexity(lengths) == pytest.approx(50)


def test_the_largest_difference_is_that_of_the_perplexities_of_one_window() -> None:
    left, right = Row(KEY, [math.log(8), 2 * math.log(8)]), Row(KEY, [math.log(8), 2 * math.log(6)])

    assert largest_difference(left, right, [2, 3]) == pytest.approx(8 / 6 - 1)


def test_a_row_is_gone_on_with_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    record = Record(file, SETTING)
    scoring = score_missing(record.row(KEY), WINDOWS, lambda window: float(window[0]), record)
    for _ in range(12):
        next(scoring)

    again = Record(file, SETTING)
    scored: list[int] = []

    def score(window: list[int]) -> float:
        scored.append(window[0])
        return float(window[0])

    list(score_missing(again.row(KEY), WINDOWS, score, again))

    # The file is written every 8 windows.
    assert scored == list(range(8, 20))
    assert Record(file, SETTING).row(KEY).sums == list(map(float, range(20)))


def test_figures_of_another_setting_are_not_mixed_with_these(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    Record(file, SETTING).save()

    with pytest.raises(ValueError, match=r"figures\.json has figures of another setting"):
        Record(file, {**SETTING, "window_tokens": 8})


def test_the_table_shows_the_change_from_the_reference() -> None:
    reference = Row(RowKey("transformers"), [3 * math.log(20)])
    ours = Row(KEY, [3 * math.log(21)], weight_bytes=3 << 20)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(make_table([reference, ours], [4], "title"))

    lines = capture.get().splitlines()

    assert any("20.0000" in line and "+0.000 %" in line for line in lines)
    assert any("21.0000" in line and "+5.000 %" in line and "3.0" in line for line in lines)


@pytest.mark.slow
def test_a_short_text_has_the_perplexity_that_transformers_finds(tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("The tide turns the mill, and the mill grinds the corn of the valley. " * 3)
    command = [sys.executable, str(PROGRAM), "--data", str(text), "--window-tokens", "20", "--all"]
    command += ["--quantization", "--kv-cache-dtype", "int8", "--threads", "1", "--json", str(file)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["key"]["quantisation"] for row in rows] == ["none", "none", "KV cache int8"]
    assert len({len(row["sums"]) for row in rows}) == 1
