"""An adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.protocol.errors import DamagedModel, ModelNotFound, UnsafeModel, UnsupportedModel
from tidemill_gpuworker.loading.safetensors_file import SafetensorsFile

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
#: Settings that change what an adapter computes, and the values that we know how to compute.
_PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A directory that was read and understood, its weights not yet taken.

    ``digest`` is sha256 hex over both files; ``rank`` the largest of its layers.
    """

    directory: Path
    digest: str
    rank: int
    _config: Mapping[str, Any]
    _weights: SafetensorsFile

    @property
    def modules(self) -> list[str]:
        """Names of the layers that it changes, as the model's checkpoint has them."""
        return sorted(
            name.removeprefix(_PREFIX).removesuffix(_DOWN)
            for name in self._weights.entries
            if name.endswith(_DOWN)
        )

    def matrices(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, in features] and B [out features, rank] of a layer, B scaled; float32."""
        down = self._weights.read(_PREFIX + module + _DOWN).float()
        up = self._weights.read(_PREFIX + module + _UP).float()
        return down, up * self._scale(down.shape[0])

    def _scale(self, rank: int) -> float:
        alpha = float(self._config["lora_alpha"])
        return alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank


def read_adapter(directory: Path) -> AdapterFiles:
    """Read and check an adapter.

    Raises:
        ModelNotFound: there is none in the directory.
        DamagedModel: a file is truncated or contradicts itself.
        UnsafeModel: the weights are a pickle.
        UnsupportedModel: it does what we do not compute; the message names the setting.
    """
    raw = _read(directory / CONFIG_NAME)
    config = _parse(raw, directory / CONFIG_NAME)
    if not (directory / WEIGHTS_NAME).is_file() and (directory / _PICKLE_NAME).is_file():
        raise UnsafeModel(
            f"{directory / _PICKLE_NAME} is a pickle, which can run code when loaded",
            fix="Save the adapter again with save_pretrained(..., safe_serialization=True).",
        )
    weights_raw = _read(directory / WEIGHTS_NAME)
    weights = SafetensorsFile(directory / WEIGHTS_NAME)
    _check_names(weights)
    ranks = [entry.shape[0] for name, entry in weights.entries.items() if name.endswith(_DOWN)]
    digest = hashlib.sha256(hashlib.sha256(raw).digest() + hashlib.sha256(weights_raw).digest())
    return AdapterFiles(directory, digest.hexdigest(), max(ranks), config, weights)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{path.parent} holds no {path.name}", fix="Give the directory of a PEFT adapter."
        ) from error
    except OSError as error:
        raise DamagedModel(f"{path} cannot be read: {error}", fix="Check it.") from error


def _parse(raw: bytes, path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} is not JSON: {error}", fix="Download it again.") from error
    if not isinstance(config, dict):
        raise DamagedModel(f"{path} is not a JSON object", fix="Download it again.")
    for name, known in _PLAIN_SETTINGS.items():
        value = config.get(name)
        if not any(value is each or value == each for each in known):
            raise UnsupportedModel(
                f"{path}: {name} {value!r} is not supported",
                fix="Train the adapter without it, or merge it into the model's weights.",
            )
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise DamagedModel(
            f"{path}: lora_alpha must be a number, not {alpha!r}", fix="Download it again."
        )
    return config


def _check_names(weights: SafetensorsFile) -> None:
    if not weights.entries:
        raise DamagedModel(f"{weights.path} holds no tensors", fix="Download it again.")
    for name, entry in weights.entries.items():
        if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
            raise UnsupportedModel(
                f"{weights.path}: tensor {name} is not a matrix of a linear layer's LoRA",
                fix="Train the adapter for linear layers only.",
            )
        if len(entry.shape) != 2 or not all(entry.shape):
            raise DamagedModel(
                f"{weights.path}: tensor {name} is {list(entry.shape)}, not a matrix",
                fix="Download it again.",
            )
        twin = name.removesuffix(_DOWN) + _UP if name.endswith(_DOWN) else None
        twin = twin or name.removesuffix(_UP) + _DOWN
        if twin not in weights.entries:
            raise DamagedModel(
                f"{weights.path}: tensor {twin} is missing", fix="Download it again."
            )
