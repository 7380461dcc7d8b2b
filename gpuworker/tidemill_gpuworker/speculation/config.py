"""The settings of speculative decoding, as vLLM's ``--speculative-config`` has them."""

import json
from dataclasses import dataclass, fields
from typing import Any

from tidemill.protocol.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 32
_DEFAULT_LOOKUP = 5
_NAMES = (
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "disable_by_batch_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed.

    Up to ``num_speculative_tokens`` are taken from behind the longest earlier occurrence of the
    last ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens.  A step in which more than
    ``disable_by_batch_size`` sequences run guesses nothing; None for no such limit.
    Raises ``ConfigError``.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "disable_by_batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                _reject(f"{field.name} must be an integer from 1 on, not {value!r}")
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            _reject(f"num_speculative_tokens exceeds {MAX_SPECULATIVE_TOKENS}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            _reject("prompt_lookup_min exceeds prompt_lookup_max")


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read the JSON object of the command line; raises ``ConfigError``.

    If only one of the two lengths of the lookup is given, the other is the same.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not JSON: {error}", fix=_FIX) from error
    if not isinstance(values, dict):
        _reject("it must be a JSON object")
    method = values.pop("method", None)
    if method != "ngram":
        _reject(f"method {method!r} is not supported")
    unknown = sorted(set(values) - set(_NAMES))
    if unknown:
        _reject(f"{unknown[0]!r} is no setting")
    if "num_speculative_tokens" not in values:
        _reject("num_speculative_tokens is missing")
    return SpeculativeConfig(**_with_lookup(values))


_FIX = (
    'Give for example {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5,'
    ' "prompt_lookup_min": 2}.'
)


def _with_lookup(values: dict[str, Any]) -> dict[str, Any]:
    longest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", _DEFAULT_LOOKUP))
    shortest = values.get("prompt_lookup_min", longest)
    return values | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}


def _reject(reason: str) -> None:
    raise ConfigError(f"speculative_config: {reason}", fix=_FIX)
