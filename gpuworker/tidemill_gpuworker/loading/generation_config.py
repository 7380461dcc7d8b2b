"""The sampling defaults of a model: its generation_config.json, and what the operator sets."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tidemill.protocol.errors import ConfigError, DamagedModel
from tidemill.protocol.messages import invalid_request
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill_gpuworker.options.worker_config import WorkerConfig

FILE = "generation_config.json"

_log = logging.getLogger(__name__)

#: What the parameters are called in the file; nothing else of it has to do with sampling.
_NAMES = {
    "max_new_tokens": "max_tokens",
    **{name: name for name in SamplingDefaults.model_fields if name != "max_tokens"},
}


def sampling_defaults(config: WorkerConfig) -> SamplingDefaults:
    """Return what requests of the model sample with where they say nothing; tells it in the log.

    Values are vLLM's: ``do_sample`` has no part in it.  Raises ``DamagedModel`` for a file that
    cannot be read or a value out of its limits, ``ConfigError`` for a directory without the file.
    """
    path = _path(config)
    values: dict[str, Any] = {} if path is None else _read(path)
    values |= config.override_generation_config
    _warn_of_others(config.override_generation_config)
    defaults = _checked(values, path)
    if defaults.given:
        told = ", ".join(f"{name} {value}" for name, value in defaults.given.items())
        source = "--override-generation-config" if path is None else str(path)
        _log.warning(
            "requests that do not say otherwise have %s, by %s; --generation-config vllm"
            " takes nothing from the model",
            told,
            source,
        )
    return defaults


def _path(config: WorkerConfig) -> Path | None:
    if config.generation_config == "vllm":
        return None
    if config.generation_config == "auto":
        path = config.model_dir / FILE
        return path if path.exists() else None
    path = Path(config.generation_config).expanduser() / FILE
    if not path.is_file():
        raise ConfigError(
            f"--generation-config: there is no {path}",
            fix=f"Give auto, vllm, or a directory that holds {FILE}.",
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} cannot be read: {error}", fix="Fetch it again.") from error
    if not isinstance(values, dict):
        raise DamagedModel(f"{path} is not a JSON object", fix="Fetch it again.")
    return values


def _checked(values: Mapping[str, Any], path: Path | None) -> SamplingDefaults:
    given = {name: values.get(key) for key, name in _NAMES.items()}
    try:
        defaults = SamplingDefaults.model_validate(given)
    except ValidationError as error:
        source = path or "--override-generation-config"
        raise DamagedModel(
            f"{source}: {invalid_request(error).message}",
            fix="Correct it, or leave it out with --generation-config vllm.",
        ) from error
    neutral = SamplingParams.model_fields
    # A card without them can be read by producers that do not know of them.
    kept = {n: v for n, v in defaults.given.items() if v != neutral[n].default}
    if kept.get("top_k") == -1:
        del kept["top_k"]
    return SamplingDefaults(**kept)


def _warn_of_others(override: Mapping[str, Any]) -> None:
    others = sorted(override.keys() - _NAMES.keys())
    if others:
        _log.warning("--override-generation-config: %s change nothing", ", ".join(others))
