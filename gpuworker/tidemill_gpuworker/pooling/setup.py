"""Loads a model for embeddings or scores and builds the engine that serves it."""

import os
import socket
from collections.abc import Callable

import torch

from tidemill.protocol.codec import WIRE_VERSION
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.ids import new_worker_id
from tidemill.protocol.messages import ModelCard, WorkerInfo
from tidemill.protocol.step_cost import StepFeatures
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.model_runner import DTYPES, parse_device
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.loading.model_task import Task
from tidemill_gpuworker.memory.no_cache import NUM_BLOCKS
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.pooling.encoder import TextEncoder
from tidemill_gpuworker.pooling.engine import PoolingEngine
from tidemill_gpuworker.pooling.work import PoolingWork

_CPU_STEP_TOKENS = 4096
_GPU_STEP_TOKENS = 32_768


def load_pooling_model(
    config: WorkerConfig, task: Task, on_step: Callable[[StepFeatures], None]
) -> ServedModel:
    """Load the model; its engine will tell ``on_step`` of each step.

    Raises ``ModelError`` if the directory cannot be served, ``ConfigError`` if a setting does not
    fit the model or the device.
    """
    device = choose_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tokenizer = Tokenizer.from_directory(config.model_dir)
    encoder = TextEncoder(
        config.model_dir, task, device=device, dtype=pooling_dtype(config.dtype, device)
    )
    card = _card(config, task, encoder, tokenizer)
    default = _CPU_STEP_TOKENS if device.type == "cpu" else _GPU_STEP_TOKENS
    # An input goes through the model whole.
    budget = max(config.max_num_batched_tokens or default, card.max_model_len)
    return ServedModel(
        engine=PoolingEngine(encoder, budget, on_step=on_step),
        tokenizer=tokenizer,
        card=card,
        info=stateless_info(config, budget),
        kinds=PoolingWork(card, tokenizer, encoder.activation),
    )


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``, for ``auto`` a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return parse_device(name)


def pooling_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights: float32 unless another one is asked for.

    Vectors that stay comparable between workers are worth more than the memory.
    """
    if name == "float16" and device.type == "cpu":
        raise ConfigError("float16 does not run on the CPU", fix="Use bfloat16 or float32.")
    return torch.float32 if name == "auto" else DTYPES[name]


def stateless_info(config: WorkerConfig, budget: int) -> WorkerInfo:
    """Return what a worker without a KV cache registers."""
    return WorkerInfo(
        worker_id=new_worker_id(),
        model=config.served_model_name,
        block_size=config.block_size,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        wire_version=WIRE_VERSION,
        hostname=socket.gethostname(),
        pid=os.getpid(),
    )


def _card(
    config: WorkerConfig, task: Task, encoder: TextEncoder, tokenizer: Tokenizer
) -> ModelCard:
    limit = encoder.max_tokens
    if config.max_model_len is not None:
        if config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is more than the model's {limit}",
                fix="Lower it.",
            )
        limit = config.max_model_len
    return ModelCard(
        name=config.served_model_name,
        revision=encoder.revision,
        tokenizer_digest=tokenizer.digest,
        max_model_len=limit,
        vocab_size=encoder.vocab_size,
        block_size=config.block_size,
        task=task,
        embedding_size=encoder.size if task == "embed" else 0,
    )
