"""adapter_config.json: what PEFT's LoraConfig says of an adapter, read and checked.

Settings that are not known to leave the computation alone are refused, so that what a later PEFT
adds is never computed as a plain LoRA.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import DamagedModel, UnsupportedModel

_FIX = "Download it again."
_PLAIN_NAME = re.compile(r"[\w.]+")
#: Settings that we compute, each checked where it is read.
_COMPUTED = frozenset({"r", "rank_pattern", "lora_alpha", "use_rslora"})
#: Settings that change what an adapter computes, and the values that we know how to compute.
_PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
#: Settings of training, and names of layers, which the names of the tensors tell too.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "velora_config",
    }
)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings that take part in the computation.

    ``rank`` is None where the file does not say; ``rank_pattern`` has layers, by their names, the
    last parts of these, or expressions for them, with ranks of their own.
    """

    path: Path
    alpha: float
    use_rslora: bool
    rank: int | None
    rank_pattern: Mapping[str, int]

    def scale(self, rank: int) -> float:
        """Return what B is multiplied with in a layer of this rank."""
        return self.alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check_rank(self, module: str, rank: int) -> None:
        """Raise ``DamagedModel`` if the matrices of a layer have another rank than it is to have.

        As in PEFT the first entry counts that is the whole name or its last parts.
        """
        if self.rank is None or rank in self._ranks(module):
            return
        announced = " or ".join(map(str, self._ranks(module)))
        raise DamagedModel(
            f"{self.path}: r and rank_pattern give layer {module} rank {announced}, its matrices"
            f" have {rank}",
            fix="Use the two files of one adapter.",
        )

    def _ranks(self, module: str) -> list[int]:
        if not all(_PLAIN_NAME.fullmatch(name) for name in self.rank_pattern):
            # A regular expression of a stranger may take hours.
            return sorted({*self.rank_pattern.values(), self.rank or 0})
        own = (r for n, r in self.rank_pattern.items() if f".{module}".endswith(f".{n}"))
        return [next(own, self.rank or 0)]


def parse_adapter_config(raw: bytes, path: Path) -> AdapterConfig:
    """Read the content of the file at ``path``.

    Raises:
        DamagedModel: it is not JSON, or a value is of the wrong kind.
        UnsupportedModel: it asks for what we do not compute; the message names the setting.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} is not JSON: {error}", fix=_FIX) from error
    if not isinstance(config, dict):
        raise DamagedModel(f"{path} is not a JSON object", fix=_FIX)
    for name in sorted(config.keys() | _PLAIN_SETTINGS.keys()):
        if name not in _COMPUTED | _HARMLESS:
            _check_plain(name, config.get(name), path)
    use_rslora = config.get("use_rslora")
    if not isinstance(use_rslora, bool | None):
        raise _wrong(path, "use_rslora", "true or false", use_rslora)
    rank = config.get("r")
    return AdapterConfig(
        path=path,
        alpha=_alpha(config, path),
        use_rslora=bool(use_rslora),
        rank=None if rank is None else _rank("r", rank, path),
        rank_pattern=_rank_pattern(config, path),
    )


def _check_plain(name: str, value: Any, path: Path) -> None:
    known = _PLAIN_SETTINGS.get(name, (None, False, "", [], {}))
    if not any(value is each or value == each for each in known):
        raise UnsupportedModel(
            f"{path}: {name[:100]} {repr(value)[:200]} is not supported",
            fix="Train the adapter without it, or merge it into the model's weights.",
        )


def _alpha(config: Mapping[str, Any], path: Path) -> float:
    value = config.get("lora_alpha")
    # As integers of Python some numbers are larger than a float can be.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        try:
            return float(value)
        except OverflowError:
            pass
    raise _wrong(path, "lora_alpha", "a number", value)


def _rank_pattern(config: Mapping[str, Any], path: Path) -> dict[str, int]:
    given = config.get("rank_pattern") or {}
    if not isinstance(given, dict):
        raise _wrong(path, "rank_pattern", "an object", given)
    return {name: _rank("rank_pattern", rank, path) for name, rank in given.items()}


def _rank(name: str, value: Any, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(path, name, "a rank from 1 on", value)
    return value


def _wrong(path: Path, name: str, expected: str, value: Any) -> DamagedModel:
    return DamagedModel(f"{path}: {name} must be {expected}, not {repr(value)[:200]}", fix=_FIX)
