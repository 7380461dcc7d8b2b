"""Typed access to the config.json of a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import DamagedModel, ModelNotFound, UnsupportedModel
from tidemill_gpuworker.models.rope import is_positive_number

# The sizes of tensors are counted in 32 bits by the kernels.
_MAX_SIZE = 2**31 - 1


def read_config(model_dir: Path) -> Mapping[str, Any]:
    """Return the parsed config.json.

    Raises:
        ModelNotFound: there is no such directory, or it holds no config.json.
        DamagedModel: config.json cannot be read.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ModelNotFound(f"no model directory {model_dir}", fix="Check the path.")
    if not path.is_file():
        raise ModelNotFound(
            f"{model_dir} holds no config.json", fix="Give a Hugging Face model directory."
        )
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedModel(
            f"{path} cannot be read: {error}", fix="Check its permissions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} is not JSON: {error}", fix="Download it again.") from error
    if not isinstance(config, dict):
        raise DamagedModel(f"{path} is not a JSON object", fix="Download it again.")
    return config


class ConfigFields:
    """The fields of one config.json; complaints name the file and the field.

    All methods raise DamagedModel for a value of the wrong kind.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigFields":
        """Return the fields with what the file leaves out filled in; a null is not left out."""
        return ConfigFields({**defaults, **self.values}, self.path)

    def size(self, name: str, default: int | None = None, *, limit: int = _MAX_SIZE) -> int:
        """Return an integer from 1 to ``limit``."""
        value = self.values.get(name)
        return self._integer(name, default if value is None else value, 1, limit)

    def count(self, name: str, default: int = 0) -> int:
        """Return an integer that is 0 or more."""
        value = self.values.get(name)
        return self._integer(name, default if value is None else value, 0, _MAX_SIZE)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.values.get(name, default)
        if not is_positive_number(value):
            raise self.damaged(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean that is off unless given."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise self.damaged(f"{name} must be true or false, not {value!r}")
        return bool(value)

    def switch(self, value: bool | str) -> bool:
        """Return ``value``, or if it is a name the flag of that name."""
        return self.flag(value) if isinstance(value, str) else value

    def section(self, name: str) -> dict[str, Any]:
        """Return a nested object, empty unless given."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.damaged(f"{name} must be an object, not {value!r}")
        return value

    def counts(self, name: str) -> list[int]:
        """Return a list of integers from 0 on, empty unless given."""
        values = self._list(name)
        return [self._integer(name, value, 0, _MAX_SIZE) for value in values]

    def names(self, name: str) -> list[str]:
        """Return a list of strings, empty unless given."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self.damaged(f"{name} must be a list of names, not {values!r}")
        return values

    def damaged(self, reason: str) -> DamagedModel:
        """Return the error for a wrong or missing value."""
        return DamagedModel(f"{self.path}: {reason}", fix="Download config.json again.")

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error for a feature that the native path does not have."""
        return UnsupportedModel(f"{self.path}: {reason}", fix="Choose another model.")

    def _integer(self, name: str, value: Any, least: int, limit: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= limit:
            raise self.damaged(f"{name} must be an integer from {least} to {limit}, not {value!r}")
        return value

    def _list(self, name: str) -> list[Any]:
        values = self.values.get(name) or []
        if not isinstance(values, list):
            raise self.damaged(f"{name} must be a list, not {values!r}")
        return values
