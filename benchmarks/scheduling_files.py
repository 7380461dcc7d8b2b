"""What runs of the scheduling benchmark came to, as files and from them."""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from scheduling_figures import Figure, Results
from scheduling_runs import Outcome

from tidemill.protocol.errors import ConfigError

_RUNS = TypeAdapter(dict[str, list[dict[str, Outcome]]])


def as_json(
    settings: Mapping[str, object],
    results: Mapping[str, Results],
    figures: Mapping[str, Sequence[Figure]],
) -> dict[str, object]:
    """Return everything measured, as plain data."""
    return {
        "settings": {key: str(value) for key, value in settings.items()},
        "conditions": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "figures": {
            name: [
                asdict(f) | {"median": f.median, "worst": f.worst, "is_met": f.is_met}
                for f in found
            ]
            for name, found in figures.items()
        },
        "runs": {
            name: [
                {label: asdict(outcome) for label, outcome in outcomes.items()}
                for outcomes in found.by_seed
            ]
            for name, found in results.items()
        },
    }


def read_results(paths: Iterable[Path]) -> dict[str, Results]:
    """Return the runs that were written to files, by cell; raises ``ConfigError``.

    Of a cell in several files the last one counts.
    """
    results: dict[str, Results] = {}
    for path in paths:
        try:
            runs = _RUNS.validate_python(json.loads(path.read_text())["runs"])
        except (OSError, ValueError, TypeError, KeyError, ValidationError) as error:
            raise ConfigError(
                f"from: {path} is no file that --json wrote: {type(error).__name__}",
                fix="Measure its cells again, with --json.",
            ) from error
        results |= {name: Results(by_seed) for name, by_seed in runs.items()}
    return results
