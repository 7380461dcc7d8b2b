"""The file of step costs that ``tidemill calibrate`` writes and ``tidemill simulate`` reads."""

import json
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.simulation.cluster import MAX_SECONDS

_FIX = "Write it with `tidemill calibrate`."


def read_cost(path: Path | None) -> StepCost:
    """Return the step costs in a file, or the guess for an H100; raises ``ConfigError``."""
    if path is None:
        return StepCost()
    values = _read(path)
    for name in StepCost.model_fields:
        _check(path, name, values)
    unknown = [name for name in values if name not in StepCost.model_fields]
    if unknown:
        raise ConfigError(f"cost: {path} has the unknown field {unknown[0]!r:.40}", fix=_FIX)
    return StepCost.model_validate(values)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cost: {path} cannot be read: {error.strerror}", fix=_FIX) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cost: {path} is not JSON", fix=_FIX) from error
    if not isinstance(values, dict):
        raise ConfigError(f"cost: {path} is not a JSON object", fix=_FIX)
    return values


def _check(path: Path, name: str, values: dict[str, Any]) -> None:
    if name not in values:
        raise ConfigError(f"cost: {path} has no field {name}", fix=_FIX)
    value = values[name]
    # No NaN is in any range.
    if type(value) not in (int, float) or not 0 <= value <= MAX_SECONDS:
        raise ConfigError(
            f"cost: {name} in {path} is not a number from 0 to {MAX_SECONDS:,.0f} s", fix=_FIX
        )
