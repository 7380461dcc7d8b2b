"""Loads a model for what it is made for."""

from collections.abc import Callable

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepFeatures
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.loading.model_task import find_task
from tidemill_gpuworker.options.worker_config import WorkerConfig


def load_served_model(
    config: WorkerConfig, on_step: Callable[[StepFeatures], None] = lambda step: None
) -> ServedModel:
    """Load the model and build the engine of its task; it will tell ``on_step`` of each step.

    Raises ``ModelError`` if the directory cannot be served, ``ConfigError`` if a setting does not
    fit the model or the device.
    """
    # Imported here: each task has libraries of its own, which take seconds to load.
    task = find_task(config.model_dir, config.task)
    if task == "generate":
        from tidemill_gpuworker.loading.model_setup import load_model

        return load_model(config, on_step)
    _check_options(config, task)
    if task == "transcribe":
        from tidemill_gpuworker.speech.setup import load_speech_model

        return load_speech_model(config, on_step)
    from tidemill_gpuworker.pooling.setup import load_pooling_model

    return load_pooling_model(config, task, on_step)


def _check_options(config: WorkerConfig, task: str) -> None:
    """Raise ``ConfigError`` for what models that generate alone can do."""
    if config.num_ranks > 1:
        raise ConfigError(
            f"a model for {task} is not split over several ranks",
            fix="Leave out --tensor-parallel-size and --pipeline-parallel-size.",
        )
    given = {
        "--quantization": config.quantization is not None,
        "--enable-lora": config.lora is not None,
        "--kv-cache-dtype": config.kv_cache_dtype != "auto",
    }
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{option} is for models that generate, this one is for {task}",
                fix="Leave it out.",
            )
