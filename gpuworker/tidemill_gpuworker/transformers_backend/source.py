"""Loads a model of `transformers` and holds it against itself before it serves."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_choice import LoadOptions
from tidemill_gpuworker.transformers_backend.config import TransformersConfig
from tidemill_gpuworker.transformers_backend.model import TransformersModel
from tidemill_gpuworker.transformers_backend.self_check import check_model, reference_logits

_FIX = "Download the model again; config.json and weights must be of the same model."
_logger = logging.getLogger(__name__)


class TransformersSource:
    """A model directory that `transformers` can run; raises as ``TransformersConfig`` does."""

    def __init__(self, model_dir: Path) -> None:
        self._config = TransformersConfig(model_dir)
        self.model_config = self._config.model_config

    def load(self, checkpoint: Checkpoint, options: LoadOptions) -> TransformersModel:
        """Load the weights and check that our attention computes what the model's own does.

        That ``checkpoint`` is open means that they are sound safetensors.

        Raises:
            DamagedModel: weights are missing, left over or shaped otherwise.
            UnsupportedModel: the logits differ from those of the model's own attention, or the
                weights are to be quantised.
        """
        if checkpoint.quantization is not None:
            raise UnsupportedModel(
                f"{self._config.architecture} cannot be quantised: it runs on transformers",
                fix="Leave --quantization out, or choose a model of a native family.",
            )
        loaded = _load(self._config, options.dtype, options.device)
        expected = reference_logits(loaded, self.model_config)
        model = TransformersModel(loaded, self._config.survey.layers)
        check_model(
            model, self.model_config, expected, options.backend, options.block_size, options.dtype
        )
        _logger.info("%s runs on transformers, with our attention", self._config.architecture)
        return model


def _load(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    disable_progress_bar()
    try:
        model, info = config.model_class.from_pretrained(
            config.model_dir,
            config=config.load(),
            dtype=dtype,
            attn_implementation="eager",
            device_map={"": device} if device.type != "cpu" else None,
            local_files_only=True,
            use_safetensors=True,
            # They are in the report then, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DamagedModel(
            f"{config.model_dir}: the weights cannot be loaded: {error}", fix=_FIX
        ) from error
    _check_complete(config, info)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _check_complete(config: TransformersConfig, info: Mapping[str, object]) -> None:
    kinds = {
        "missing_keys": "is missing",
        "mismatched_keys": "has another shape than config.json gives it",
        "unexpected_keys": "has no place in the model that config.json describes",
    }
    for kind, complaint in kinds.items():
        found = info.get(kind)
        if isinstance(found, set | list | tuple) and found:
            first = min(name if isinstance(name, str) else str(name[0]) for name in found)
            raise DamagedModel(f"{config.model_dir}: tensor {first} {complaint}", fix=_FIX)
