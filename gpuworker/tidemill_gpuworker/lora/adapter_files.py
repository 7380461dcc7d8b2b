"""An adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.protocol.errors import (
    DamagedModel,
    ModelError,
    ModelNotFound,
    UnsafeModel,
    UnsupportedModel,
)
from tidemill_gpuworker.loading.safetensors_file import SafetensorsFile
from tidemill_gpuworker.lora.adapter_config import AdapterConfig, parse_adapter_config

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A directory that was read and understood, its weights not yet taken.

    ``digest`` is sha256 hex over both files; ``rank`` the largest of its layers.
    """

    directory: Path
    digest: str
    rank: int
    _config: AdapterConfig
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
        scaled = up * self._config.scale(down.shape[0])
        if not (down.isfinite().all() and scaled.isfinite().all()):
            raise DamagedModel(
                f"{self.directory}: the matrices of {module} hold numbers that are not finite",
                fix="Check lora_alpha, and save or download the adapter again.",
            )
        return down, scaled


def read_adapter(directory: Path) -> AdapterFiles:
    """Read and check an adapter; whatever is in the directory, raises no other error than these.

    Raises:
        ModelNotFound: there is none in the directory.
        DamagedModel: a file is truncated or contradicts itself or the other one.
        UnsafeModel: the weights are a pickle.
        UnsupportedModel: it does what we do not compute; the message names the setting.
    """
    try:
        return _read_files(directory)
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        _log.warning("%s: reading the adapter failed", directory, exc_info=True)
        raise DamagedModel(
            f"{directory}: the adapter cannot be read: {type(error).__name__}: {error}",
            fix="Save or download it again.",
        ) from error


def _read_files(directory: Path) -> AdapterFiles:
    raw = _read(directory / CONFIG_NAME)
    config = parse_adapter_config(raw, directory / CONFIG_NAME)
    if not (directory / WEIGHTS_NAME).is_file() and (directory / _PICKLE_NAME).is_file():
        raise UnsafeModel(
            f"{directory / _PICKLE_NAME} is a pickle, which can run code when loaded",
            fix="Save the adapter again with save_pretrained(..., safe_serialization=True).",
        )
    weights_raw = _read(directory / WEIGHTS_NAME)
    weights = SafetensorsFile(directory / WEIGHTS_NAME)
    _check_names(weights)
    ranks = {
        name.removeprefix(_PREFIX).removesuffix(_DOWN): entry.shape[0]
        for name, entry in weights.entries.items()
        if name.endswith(_DOWN)
    }
    for module, rank in ranks.items():
        config.check_rank(module, rank)
    digest = hashlib.sha256(hashlib.sha256(raw).digest() + hashlib.sha256(weights_raw).digest())
    return AdapterFiles(directory, digest.hexdigest(), max(ranks.values()), config, weights)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{path.parent} holds no {path.name}", fix="Give the directory of a PEFT adapter."
        ) from error
    except OSError as error:
        raise DamagedModel(f"{path} cannot be read: {error}", fix="Check it.") from error


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
