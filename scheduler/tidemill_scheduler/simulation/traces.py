"""Reads public traces: Mooncake's JSON lines with chained hashes, Azure's CSV with lengths only."""

import csv
import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.workload import Table, Workload

#: Tokens for each of Mooncake's hash ids.
MOONCAKE_TOKENS_PER_HASH = 512


def load_trace(path: Path | str, *, limit: int = 0) -> Workload:
    """Read a trace by its suffix, .jsonl or .csv; raises ``ConfigError``."""
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
    blocks only.  Raises ``ConfigError`` naming the line.
    """
    table, dense = Table(), dict[int, int]()
    for number, line in enumerate(_lines(path, limit), 1):
        try:
            entry = json.loads(line)
            length = int(entry["input_length"])
            full = entry["hash_ids"][: length // MOONCAKE_TOKENS_PER_HASH]
            ids = [dense.setdefault(int(i), len(dense)) for i in full]
            lengths = (length, int(entry["output_length"]))
            table.append(ids, lengths, entry["timestamp"] / 1000)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise _bad_line(path, number, error) from error
    return Workload(Path(path).stem, table, MOONCAKE_TOKENS_PER_HASH)


def load_azure(path: Path | str, *, limit: int = 0) -> Workload:
    """Read ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``; no prompt shares a prefix.

    Raises ``ConfigError`` naming the line.
    """
    table, start = Table(), None
    for number, row in enumerate(csv.DictReader(_lines(path, limit and limit + 1)), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            length = int(row["ContextTokens"])
            first = table.num_ids
            ids = list(range(first, first + length // MOONCAKE_TOKENS_PER_HASH))
            start = at if start is None else start
            table.append(ids, (length, int(row["GeneratedTokens"])), at - start)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise _bad_line(path, number, error) from error
    return Workload(Path(path).stem, table, MOONCAKE_TOKENS_PER_HASH)


def _lines(path: Path | str, limit: int) -> Iterable[str]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file):
                if limit and number >= limit:
                    return
                yield line
    except OSError as error:
        raise ConfigError(
            f"trace: {path} cannot be read: {error.strerror}", fix="Check the path."
        ) from error


def _bad_line(path: Path | str, number: int, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {error}"
    return ConfigError(
        f"trace: line {number} of {path} is not in the format ({reason})",
        fix="Check that the file is the trace as published.",
    )
