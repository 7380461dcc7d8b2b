"""How a model's hidden states become one vector, as sentence-transformers writes it down."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.loading.model_task import MODULES_NAME

Pooling = Literal["mean", "cls", "last"]

_MODES: Mapping[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
#: Flags of older files.
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_FIX = "Fetch the model again."


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    """Which hidden states make the vector, and how many tokens the model was trained to read."""

    pooling: Pooling
    max_tokens: int | None = None


def read_recipe(model_dir: Path, *, is_decoder: bool) -> PoolingRecipe:
    """Read ``modules.json`` and what it names.

    Without it an encoder's vectors are means, as sentence-transformers has it, and a decoder's
    come from the last token.  Raises ``DamagedModel``, or ``UnsupportedModel`` for a module or a
    pooling that Tidemill does not run.
    """
    pooling: Pooling = "last" if is_decoder else "mean"
    for module in _modules(model_dir):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(model_dir / str(module.get("path", "")) / "config.json")
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedModel(
                f"{model_dir / MODULES_NAME}: a module of type {kind} is not supported",
                fix="Choose a model of the modules Transformer, Pooling and Normalize.",
            )
    return PoolingRecipe(pooling, _max_tokens(model_dir))


def _modules(model_dir: Path) -> list[dict[str, Any]]:
    modules = _read(model_dir / MODULES_NAME, [])
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise DamagedModel(f"{model_dir / MODULES_NAME} is not a list of modules", fix=_FIX)
    return modules


def _pooling(path: Path) -> Pooling:
    config = _object(path)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [m for f, m in _FLAGS.items() if config.get(f)]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported",
            fix=f"Choose a model with one of {', '.join(_MODES)}.",
        )
    return _MODES[modes[0]]


def _max_tokens(model_dir: Path) -> int | None:
    value = _object(model_dir / "sentence_bert_config.json").get("max_seq_length")
    return value if isinstance(value, int) and value > 0 else None


def _object(path: Path) -> dict[str, Any]:
    values = _read(path, {})
    if not isinstance(values, dict):
        raise DamagedModel(f"{path} is not a JSON object", fix=_FIX)
    return values


def _read(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} cannot be read: {error}", fix=_FIX) from error
