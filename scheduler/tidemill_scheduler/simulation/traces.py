"""Reads public traces: Mooncake's JSON lines with chained hashes, Azure's CSV with lengths only."""

import csv
import json
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.workload import Table, Workload

#: Tokens for each of Mooncake's hash ids.
MOONCAKE_TOKENS_PER_HASH = 512

#: The longest prompt and the longest output of a job.
MAX_TOKENS = 100_000_000

#: Milliseconds since 1970 fit, with a clock that still tells microseconds apart.
MAX_TIMESTAMP_MS = 10**13

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

#: What a line that is not in the format may raise; a deeply nested one recurses too far.
_BAD_LINE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def load_trace(path: Path | str, *, limit: int = 0) -> Workload:
    """Read a trace by its suffix, .jsonl or .csv; raises ``ConfigError``.

    Jobs come in the order of their times, which count from the first of them.
    """
    loaders = {".jsonl": load_mooncake, ".csv": load_azure}
    suffix = Path(path).suffix
    if suffix not in loaders:
        raise ConfigError(
            f"trace: {path} has the unknown suffix {suffix!r}",
            fix="Give a .jsonl file in Mooncake's format or a .csv file in Azure's.",
        )
    return loaders[suffix](path, limit=limit)


def load_mooncake(path: Path | str, *, limit: int = 0) -> Workload:
    """Read ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.

    The id of a last block that the prompt does not fill is left out, because a KV cache finds full
    blocks only.  Ids stand for the same prefix only where all ids before them are the same, which
    in published traces they always are.  Raises ``ConfigError`` naming the line.
    """
    table, dense = Table(), dict[tuple[int, int], int]()
    for number, line in _lines(path, limit):
        try:
            if line.isspace():
                continue
            entry = _entry(line)
            length = _integer(entry, "input_length", 1)
            full = _hash_ids(entry)[: length // MOONCAKE_TOKENS_PER_HASH]
            lengths = (length, _integer(entry, "output_length", 0))
            table.append(_chain(full, dense), lengths, _milliseconds(entry) / 1000)
        except _BAD_LINE as error:
            raise _bad_line(path, number, error) from error
    return _workload(path, table)


def load_azure(path: Path | str, *, limit: int = 0) -> Workload:
    """Read ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``; no prompt shares a prefix.

    Times without a zone are taken as UTC.  Raises ``ConfigError`` naming the line.
    """
    table = Table()
    rows = csv.DictReader(line for _, line in _lines(path, limit and limit + 1))
    try:
        _check_header(rows.fieldnames)
        for row in rows:
            length = _count(row, "ContextTokens", 1)
            first = table.num_ids
            ids = list(range(first, first + length // MOONCAKE_TOKENS_PER_HASH))
            table.append(ids, (length, _count(row, "GeneratedTokens", 0)), _seconds(row))
    except (csv.Error, *_BAD_LINE) as error:
        raise _bad_line(path, max(1, rows.reader.line_num), error) from error
    return _workload(path, table)


def _workload(path: Path | str, table: Table) -> Workload:
    if not len(table):
        raise ConfigError(f"trace: {path} holds no jobs", fix="Give a trace of one job or more.")
    return Workload(Path(path).stem, table.in_order(), MOONCAKE_TOKENS_PER_HASH)


def _chain(ids: list[int], dense: dict[tuple[int, int], int]) -> list[int]:
    """Number each prefix: the id of a block behind the number of all before it."""
    chain, parent = [], -1
    for i in ids:
        parent = dense.setdefault((parent, i), len(dense))
        chain.append(parent)
    return chain


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg})") from error
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    return entry


def _hash_ids(entry: dict[str, Any]) -> list[int]:
    ids = entry["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError("hash_ids is not a list of integers")
    return ids


def _milliseconds(entry: dict[str, Any]) -> float:
    value = entry["timestamp"]
    # No NaN is in any range.
    if type(value) not in (int, float) or not 0 <= value <= MAX_TIMESTAMP_MS:
        raise ValueError(f"timestamp {_shown(value)} is not from 0 to {MAX_TIMESTAMP_MS:,} ms")
    return float(value)


def _seconds(row: dict[str, str]) -> float:
    at = datetime.fromisoformat(str(row["TIMESTAMP"]))
    # The local zone would let the clock jump in spring.
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _integer(entry: dict[str, Any], name: str, least: int) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise ValueError(f"{name} {_shown(value)} is not from {least} to {MAX_TOKENS:,}")
    return value


def _count(row: dict[str, str], name: str, least: int) -> int:
    text = row[name]
    value = int(text) if text and text.strip().isdecimal() and len(text) < 20 else None
    return _integer({name: text if value is None else value}, name, least)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_header(names: Collection[str] | None) -> None:
    """Raise ``ValueError`` if a column is missing; a file without any line is told elsewhere."""
    missing = [name for name in _AZURE_COLUMNS if names is not None and name not in names]
    if missing:
        raise ValueError(f"there is no column {' or '.join(missing)}")


def _lines(path: Path | str, limit: int) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if limit and number > limit:
                    return
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _bad_line(path, number, ValueError("it is not UTF-8")) from error
    except OSError as error:
        raise ConfigError(
            f"trace: {path} cannot be read: {error.strerror}", fix="Check the path."
        ) from error


def _bad_line(path: Path | str, number: int, error: Exception) -> ConfigError:
    reason = f"there is no {error.args[0]}" if isinstance(error, KeyError) else str(error)
    return ConfigError(
        f"trace: line {number} of {path} is not in the format: {reason}",
        fix="Check that the file is the trace as published.",
    )
