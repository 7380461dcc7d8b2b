"""Models whose code and loader are those of transformers, with complaints of our own."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tidemill.protocol.errors import DamagedModel, TidemillError, UnsupportedModel

_MAX_REASON = 300
#: What a library raises for something that it does not have.
_LACKS = (ImportError, NotImplementedError, LookupError, ValueError)
#: Values that follow from the config, and that older checkpoints hold.
_BUFFERS = frozenset({"position_ids", "token_type_ids", "inv_freq", "masked_bias"})
#: What stands on top of a model for one task of training, and is left out for another task.
_HEADS = frozenset(
    {
        *("lm_head", "lm_heads", "lm_loss", "lm_predictions", "mlm_head", "mask_predictions"),
        *("cls", "predictions", "decoder", "head", "embed_out", "proj_out", "pred_layer"),
        *("vocab_transform", "vocab_layer_norm", "vocab_projector", "sop_classifier"),
        *("generator_predictions", "generator_lm_head", "discriminator_predictions"),
        *("classifier", "pre_classifier", "classification_head", "score", "sequence_summary"),
        *(
            "qa_outputs",
            "qa_classifier",
            "start_logits",
            "end_logits",
            "answer_class",
            "logits_proj",
        ),
        *("multiple_choice_head", "projection_head", "entity_predictions", "contact_head"),
        *("v_head", "pooler"),
    }
)
_FIX = "Download the model again; config.json and weights must be of the same model."


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises on a model's file or directory into an error that names it.

    Raises:
        UnsupportedModel: the library does not have what the model asks for.
        DamagedModel: anything else, but for a lack of memory and faults of the device.
    """
    try:
        yield
    except (TidemillError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]
        if isinstance(error, _LACKS):
            raise UnsupportedModel(
                f"{path}: transformers cannot load it: {reason}",
                fix="Choose a model whose architecture is part of transformers.",
            ) from error
        raise DamagedModel(f"{path} cannot be used: {reason}", fix=_FIX) from error


def load_pretrained(kind: Any, model_dir: Path, dtype: torch.dtype, unused: Sequence[str]) -> Any:
    """Return a model of a class of transformers; its weights and its config agree.

    ``unused`` are parts of names of tensors that are not needed.  Raises ``DamagedModel`` or
    ``UnsupportedModel``.
    """
    transformers.utils.logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with reading(model_dir / "config.json"):
        configs = getattr(kind, "config_class", None) or transformers.AutoConfig
        config = configs.from_pretrained(model_dir, **local)
    with reading(model_dir):
        model, info = kind.from_pretrained(
            model_dir,
            config=config,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            # They are told by their names below.
            ignore_mismatched_sizes=True,
            **local,
        )
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise _damaged(
            model_dir, f"tensor {name} is {list(stored)}, config.json makes it {list(expected)}"
        )
    missing, unexpected = info["missing_keys"], info["unexpected_keys"]
    for name in _needed(missing, unused):
        raise _damaged(model_dir, f"tensor {name} is missing from the weights")
    for name in _needed(unexpected, unused):
        if not _is_elsewhere(name, model):
            raise _damaged(model_dir, f"config.json has no place for tensor {name} of the weights")
    return model


def check_finite(outputs: torch.Tensor, model_dir: Path, dtype: torch.dtype) -> None:
    """Raise ``DamagedModel`` if there is something that is no number in what a model computed."""
    if not outputs.isfinite().all():
        raise DamagedModel(
            f"{model_dir}: the weights give outputs that are not finite in {dtype}",
            fix="Download the model again; if that is no help, choose the dtype float32.",
        )


def is_buffer(name: str) -> bool:
    """Whether a tensor that a model has no place for follows from its config."""
    return name.rpartition(".")[2] in _BUFFERS


def _needed(names: Collection[str], unused: Sequence[str]) -> list[str]:
    return sorted(name for name in names if not any(part in name for part in unused))


def _is_elsewhere(name: str, model: Any) -> bool:
    """Whether the model computes the same with a tensor as without it."""
    base = model.base_model
    own = name.removeprefix(f"{model.base_model_prefix}.")
    if is_buffer(own):
        return True
    part = own.partition(".")[0]
    parts = {each for owner in (model, base) for each, _ in owner.named_children()}
    return part in _HEADS - parts


def _damaged(model_dir: Path, reason: str) -> DamagedModel:
    return DamagedModel(f"{model_dir}: {reason}", fix=_FIX)
