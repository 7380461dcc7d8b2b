"""Rows of the perplexity benchmark: what each window scored, kept in a file, and their table."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

PLAIN = "none"
#: Windows between two writes of the file.
_SAVE_EVERY = 8

#: Returns the summed negative logprobs of all tokens of a window but the first.
Scorer = Callable[[list[int]], float]


@dataclass(frozen=True)
class RowKey:
    """What a row measures: who computes it, and with which weights and cache."""

    system: str
    quantisation: str = PLAIN


@dataclass
class Row:
    """The summed negative logprobs of each window scored so far.

    ``weight_bytes`` is 0 where it is not known; ``cpu_seconds`` are those of scoring alone.
    """

    key: RowKey
    sums: list[float] = field(default_factory=list)
    weight_bytes: int = 0
    cpu_seconds: float = 0.0

    def perplexity(self, lengths: Sequence[int]) -> float:
        """Return e to the mean over all predicted tokens of windows of these ``lengths``."""
        num_predicted = sum(lengths) - len(lengths)
        return math.exp(math.fsum(self.sums[: len(lengths)]) / num_predicted)


class Record:
    """The rows of one text, model and dtype, in a JSON file, so that a run can be gone on with.

    More windows than before are scored in addition to those that are there.  Raises ``ValueError``
    if the file is of another ``setting``.
    """

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self._path = path
        self._setting = setting
        self.rows: dict[RowKey, Row] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["setting"] != setting:
                raise ValueError(f"{path} has figures of another setting: {kept['setting']}")
            for fields in kept["rows"]:
                key = RowKey(**fields.pop("key"))
                self.rows[key] = Row(key, **fields)

    def row(self, key: RowKey) -> Row:
        """Return the row as far as it is known."""
        return self.rows.setdefault(key, Row(key))

    def save(self) -> None:
        """Write what is known, whole or not at all."""
        if self._path is None:
            return
        rows = [asdict(row) for row in self.rows.values()]
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"setting": self._setting, "rows": rows}, indent=1))
        new.replace(self._path)


def cut(ids: Sequence[int], num_windows: int | None, size: int) -> list[list[int]]:
    """Return the first windows that are full, one behind the other, or all if None.

    All means to the end: the last one may be shorter.  Raises ``ValueError`` if there is none.
    """
    starts = range(0, len(ids), size)
    windows = [list(ids[start : start + size]) for start in starts]
    if num_windows is not None:
        windows = [window for window in windows if len(window) == size][:num_windows]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ValueError(f"the text has {len(ids)} tokens, too few for a window of {size}")
    return windows


def score_missing(
    row: Row, windows: Sequence[list[int]], score: Scorer, record: Record
) -> Iterator[None]:
    """Score the windows that a row lacks and keep it in the record; yields after each."""
    for window in windows[len(row.sums) :]:
        start = time.process_time()
        row.sums.append(score(window))
        row.cpu_seconds += time.process_time() - start
        if len(row.sums) % _SAVE_EVERY == 0:
            record.save()
        yield
    record.save()


def largest_difference(left: Row, right: Row, lengths: Sequence[int]) -> float:
    """Return by how much the perplexities of a single window differ at most, relatively."""
    pairs = zip(left.sums, right.sums, lengths, strict=False)
    return max(abs(math.expm1((a - b) / (length - 1))) for a, b, length in pairs)


def make_table(rows: Sequence[Row], lengths: Sequence[int], title: str) -> Table:
    """Return all rows, beside the change from the first."""
    table = Table(title=title)
    for column in ("system", "quantisation"):
        table.add_column(column)
    for column in ("perplexity", "change", "weights MiB", "CPU s"):
        table.add_column(column, justify="right")
    reference = rows[0].perplexity(lengths)
    for row in rows:
        found = row.perplexity(lengths)
        size = f"{row.weight_bytes / 2**20:.1f}" if row.weight_bytes else "-"
        table.add_row(
            *(row.key.system, row.key.quantisation, f"{found:.4f}"),
            f"{100 * (found / reference - 1):+.3f} %",
            *(size, f"{row.cpu_seconds:.1f}"),
        )
    return table
