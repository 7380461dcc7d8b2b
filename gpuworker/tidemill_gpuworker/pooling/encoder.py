"""Encoders of transformers: batches of token ids in, one row each out."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill.service.job_inputs import EncoderInput
from tidemill_gpuworker.loading.config_fields import read_config
from tidemill_gpuworker.loading.foreign_model import check_finite, load_pretrained, reading
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_task import Task, architecture_of, refuse_own_code
from tidemill_gpuworker.pooling.recipe import Pooling, read_recipe

#: Parts of a model that a checkpoint may lack.
_UNUSED = ("position_ids",)
#: Encoders of the RoBERTa family count positions from the padding id on.
_OFFSET_FAMILIES = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "mpnet",
    "data2vec-text",
)

_FIX = "Download the model again."

Activation = Callable[[torch.Tensor], torch.Tensor]


class TextEncoder:
    """A model that reads whole texts; weights are safetensors, code is that of transformers.

    ``rows`` gives pooled hidden states [inputs, hidden] of a model for embeddings, logits [inputs,
    1] of a cross-encoder.

    Raises:
        ModelError: the directory cannot be served; the subclass says why.
    """

    def __init__(
        self, model_dir: Path, task: Task, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        config = read_config(model_dir)
        refuse_own_code(config, model_dir / "config.json")
        self.device = device
        self.revision = Checkpoint(model_dir, dtype=dtype, device=device).revision()
        self._task = task
        with reading(model_dir):
            self._set_up(config, model_dir, dtype)
            check_finite(self.rows(self._trial()), model_dir, dtype)

    def _set_up(self, config: Mapping[str, Any], model_dir: Path, dtype: torch.dtype) -> None:
        self._model = _load(model_dir, self._task, dtype).to(self.device).eval()
        settings = self._model.config
        is_decoder = architecture_of(config).endswith("ForCausalLM")
        recipe = read_recipe(model_dir, is_decoder=is_decoder)
        self.pooling: Pooling = recipe.pooling
        self.max_tokens = min(_max_positions(settings), recipe.max_tokens or 1 << 30)
        self.vocab_size = int(settings.vocab_size)
        self.size = int(settings.hidden_size)
        self._pad_id = int(settings.pad_token_id or 0)
        self._has_types = getattr(settings, "type_vocab_size", 0) > 1
        self.activation = _activation(config)
        if self.max_tokens < 1:
            raise DamagedModel(f"{model_dir}: it has no positions for tokens", fix=_FIX)
        if self._task == "score":
            _check_labels(settings, model_dir)

    def _trial(self) -> list[EncoderInput]:
        """Return two inputs, of which one is padded if there is room for that."""
        ids = (0, self.vocab_size - 1)[: self.max_tokens]
        return [EncoderInput(ids), EncoderInput(ids[:1])]

    @torch.inference_mode()
    def rows(self, batch: Sequence[EncoderInput]) -> torch.Tensor:
        """Return float32 rows [inputs, size] on the CPU.

        Inputs are padded on the right and the padding is masked, so that the rows do not depend on
        their neighbours but for rounding.
        """
        lengths = torch.tensor([len(item.ids) for item in batch], device=self.device)
        arguments = {
            "input_ids": self._padded([item.ids for item in batch], self._pad_id),
            "attention_mask": _mask(lengths),
        }
        if self._has_types:
            types = [item.type_ids or (0,) * len(item.ids) for item in batch]
            arguments["token_type_ids"] = self._padded(types, 0)
        output: Any = self._model(**arguments)
        if self._task == "score":
            logits: torch.Tensor = output.logits
            return logits.float().cpu()
        hidden = output.last_hidden_state.float()
        return pool(hidden, lengths, self.pooling).cpu()

    def _padded(self, rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
        longest = max(map(len, rows))
        table = [[*row, *[filler] * (longest - len(row))] for row in rows]
        return torch.tensor(table, device=self.device)


def pool(hidden: torch.Tensor, lengths: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return one row [inputs, size] of the hidden states [inputs, tokens, size] of each input."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    mask = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None])[..., None]
    return (hidden * mask).sum(dim=1) / lengths[:, None]


def _mask(lengths: torch.Tensor) -> torch.Tensor:
    longest = int(lengths.max())
    return (torch.arange(longest, device=lengths.device) < lengths[:, None]).long()


def _load(model_dir: Path, task: Task, dtype: torch.dtype) -> Any:
    if task == "score":
        kind = transformers.AutoModelForSequenceClassification
        return load_pretrained(kind, model_dir, dtype, _UNUSED)
    return load_pretrained(transformers.AutoModel, model_dir, dtype, (*_UNUSED, "pooler."))


def _max_positions(settings: Any) -> int:
    positions = int(getattr(settings, "max_position_embeddings", 0) or 1 << 20)
    if settings.model_type in _OFFSET_FAMILIES:
        positions -= int(settings.pad_token_id or 0) + 1
    return positions


def _check_labels(settings: Any, model_dir: Path) -> None:
    if settings.num_labels != 1:
        raise UnsupportedModel(
            f"{model_dir}: it tells {settings.num_labels} classes apart, and a score is one number",
            fix="Choose a cross-encoder with num_labels 1.",
        )


def _activation(config: Any) -> Activation:
    """Return what turns a cross-encoder's logits into scores, sigmoid unless the config differs."""
    own = config.get("sentence_transformers") or {}
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    name = str(named or "Sigmoid").rpartition(".")[2]
    known: dict[str, Activation] = {"Sigmoid": functional.sigmoid, "Identity": lambda x: x}
    if name not in known:
        raise UnsupportedModel(
            f"config.json: the activation function {name} is not supported",
            fix=f"Choose a cross-encoder with one of {', '.join(known)}.",
        )
    return known[name]
