"""From a worker's command line to its settings."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.values import MAX_NAME_CHARS
from tidemill.service.config import ServiceConfig
from tidemill.service.model_name import default_served_name
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.options.vllm_flags import translate
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.options.worker_options import make_parser

_log = logging.getLogger(__name__)


def parse_config(arguments: Sequence[str], service: ServiceConfig) -> WorkerConfig:
    """Read the command line; raises ``ConfigError``, or ends the process after ``--help``.

    Flags that vLLM has and Tidemill has not are told of in the log.
    """
    translation = translate(arguments)
    values = vars(make_parser().parse_args(translation.arguments))
    for note in translation.notes:
        _log.warning(note)
    redis_url = values.pop("redis_url") or service.redis_url
    if redis_url is None:
        raise ConfigError(
            "the worker does not know its broker",
            fix="Give --redis-url or set TIDEMILL_REDIS_URL; `tidemill up` does it for you.",
        )
    model = values.pop("model")
    name = _check_name(values.pop("served_model_name") or default_served_name(model))
    lora = _take_lora(values)
    return WorkerConfig(
        model=model,
        model_dir=Path(model).expanduser(),
        served_model_name=name,
        redis_url=redis_url,
        service=service,
        lora=lora,
        **values,
    )


def _check_name(name: str) -> str:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"--served-model-name {name[:MAX_NAME_CHARS]!r} is not 1 to {MAX_NAME_CHARS} printable"
            " characters",
            fix="Give a name; without one it is the last part of --model.",
        )
    return name


def _take_lora(values: dict[str, Any]) -> LoraConfig | None:
    is_on = values.pop("enable_lora")
    modules, directory = values.pop("lora_modules"), values.pop("lora_dir")
    limits = {name: values.pop(name) for name in ("max_loras", "max_lora_rank")}
    if not is_on:
        if modules or directory:
            raise ConfigError(
                "adapters are given, but LoRA is off", fix="Add --enable-lora, or leave them out."
            )
        return None
    return LoraConfig(
        modules=tuple(modules),
        directory=directory,
        max_loras=limits["max_loras"],
        max_rank=limits["max_lora_rank"],
    )
