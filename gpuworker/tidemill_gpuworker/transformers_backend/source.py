"""Loads a model of `transformers` and holds it against itself before it serves."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.loading.foreign_model import is_buffer
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_choice import LoadOptions, MakeCache, Model
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.parallel.shard import Place
from tidemill_gpuworker.transformers_backend.config import TransformersConfig
from tidemill_gpuworker.transformers_backend.model import TransformersModel
from tidemill_gpuworker.transformers_backend.self_check import check_model, reference_logits
from tidemill_gpuworker.transformers_backend.split import split_model, splits_head

_FIX = "Download the model again; config.json and weights must be of the same model."
_logger = logging.getLogger(__name__)


class TransformersSource:
    """A model directory that `transformers` can run; raises as ``TransformersConfig`` does."""

    def __init__(self, model_dir: Path) -> None:
        self._config = TransformersConfig(model_dir)
        self.model_config = self._config.model_config
        self._expected: torch.Tensor | None = None

    @property
    def impl(self) -> Literal["transformers"]:
        """The layers of `transformers`."""
        return "transformers"

    def split(self, place: Place) -> ModelConfig:
        """Return the shape of a part; raises as ``TransformersConfig.split`` does."""
        return self._config.split(place)

    def load(self, checkpoint: Checkpoint, options: LoadOptions) -> TransformersModel:
        """Load the weights, or those of a part.

        That ``checkpoint`` is open means that they are sound safetensors.  A part is cut out on the
        CPU, where the whole model must have room.

        Raises:
            DamagedModel: weights are missing, left over or shaped otherwise.
            UnsupportedModel: the weights are to be quantised.
        """
        if checkpoint.quantization is not None:
            raise UnsupportedModel(
                f"{self._config.architecture} cannot be quantised: it runs on transformers",
                fix="Leave --quantization out, or choose a model of a native family.",
            )
        shard = options.place.tensor
        device = options.device if shard.is_whole else torch.device("cpu")
        loaded = _load(self._config, options.dtype, device)
        if options.place.leads:
            self._expected = reference_logits(loaded, self.model_config).to(options.device)
        has_parts = splits_head(loaded.get_output_embeddings(), shard)
        if not shard.is_whole:
            num_weights = loaded.num_parameters()
            split_model(loaded, shard, options.ranks)
            checkpoint.leave(num_weights - loaded.num_parameters())
            loaded.to(options.device)
        found = self._config.survey
        return TransformersModel(
            loaded, found.layers, vocab_size=found.vocab_size, head_is_split=has_parts
        )

    def check(self, model: Model, options: LoadOptions, make_cache: MakeCache) -> None:
        """Check that our attention, and all ranks together, compute what the model itself does.

        Raises UnsupportedModel if the logits differ from those that the whole model gave.
        """
        assert self._expected is not None, "the leader has loaded the model"
        check_model(model, self.model_config, self._expected, options, make_cache)
        self._expected = None
        _logger.info("%s runs on transformers, with our attention", self._config.architecture)


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
        if not isinstance(found, set | list | tuple):
            continue
        names = {name if isinstance(name, str) else str(name[0]) for name in found}
        if kind == "unexpected_keys":
            names = {name for name in names if not is_buffer(name)}
        if names:
            raise DamagedModel(f"{config.model_dir}: tensor {min(names)} {complaint}", fix=_FIX)
