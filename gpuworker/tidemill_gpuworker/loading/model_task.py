"""What kind of jobs a checkpoint is for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tidemill.protocol.errors import ConfigError, UnsafeModel
from tidemill_gpuworker.loading.config_fields import read_config

Task = Literal["generate", "embed", "score", "transcribe"]
TASKS: tuple[Task, ...] = ("generate", "embed", "score", "transcribe")

_DECODER: tuple[Task, ...] = ("generate", "embed")

#: What sentence-transformers writes beside a model that it made for embeddings.
MODULES_NAME = "modules.json"


def find_task(model_dir: Path, wanted: str = "auto") -> Task:
    """Return the task of the model in ``model_dir``, or the one that was asked for.

    A decoder is for embeddings if it comes with a ``modules.json``, or if it is asked to be.
    Raises ``ModelError`` for a directory without a readable config, ``ConfigError`` if the model
    cannot do what is wanted.
    """
    config = read_config(model_dir)
    architecture = architecture_of(config)
    possible = _possible(architecture)
    if wanted == "auto":
        is_embedder = "embed" in possible and (model_dir / MODULES_NAME).is_file()
        return "embed" if is_embedder else possible[0]
    for task in possible:
        if task == wanted:
            return task
    raise ConfigError(
        f"--task {wanted} does not fit {architecture}",
        fix=f"Leave --task out, or choose {' or '.join(possible)}.",
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the name of the class of a model."""
    named = config.get("architectures") or [config.get("model_type", "unknown")]
    return str(named[0]) if isinstance(named, list) and named else str(named)


def refuse_own_code(config: Mapping[str, Any], path: Path) -> None:
    """Raise ``UnsafeModel`` if a model asks for code of its own."""
    if config.get("auto_map"):
        raise UnsafeModel(
            f"{path} asks for code of its own (auto_map), which Tidemill never runs",
            fix="Choose a model whose architecture is part of transformers.",
        )


def _possible(architecture: str) -> tuple[Task, ...]:
    """Return the tasks that an architecture can do, the most likely first."""
    if architecture.endswith("ForSequenceClassification"):
        return ("score",)
    if architecture == "WhisperForConditionalGeneration":
        return ("transcribe",)
    if architecture.endswith("ForMaskedLM"):
        return ("embed",)
    # A language model's name may end like an encoder's: GPT2LMHeadModel.
    return _as_transformers_says(architecture) if architecture.endswith("Model") else _DECODER


def _as_transformers_says(architecture: str) -> tuple[Task, ...]:
    # Imported here: transformers takes seconds, which models of plainer names need not wait for.
    from transformers.models.auto import modeling_auto as lists

    if architecture not in lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return ("embed",)
    is_masked_too = architecture in lists.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    return ("embed", "generate") if is_masked_too else _DECODER
