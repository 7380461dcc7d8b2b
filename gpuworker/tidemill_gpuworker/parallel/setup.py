"""From the settings of a worker to the ranks that its model runs on."""

import torch
import torch.distributed as dist

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.parallel.team import Team

# Of the time after which a step counts as hung: what waits for a rank ends before that.
_WAIT_SHARE = 0.75
_MIN_WAIT_SECONDS = 1.0


def make_team(config: WorkerConfig, device: str) -> Team | None:
    """Return the ranks that the settings ask for, none of them started; None for one process.

    Raises ``ConfigError`` if ``device`` has not enough of them or they cannot compute together, or
    if LoRA is to go with stages.
    """
    if config.num_ranks == 1:
        return None
    if config.lora is not None and config.pipeline_parallel_size > 1:
        raise ConfigError(
            "LoRA adapters do not go with pipeline stages",
            fix="Leave out --enable-lora or --pipeline-parallel-size.",
        )
    _check_device(config.num_ranks, device)
    return Team(
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        device=device,
        timeout_seconds=max(_MIN_WAIT_SECONDS, _WAIT_SHARE * config.max_step_seconds),
        num_threads=threads_per_rank(config, device),
    )


def threads_per_rank(config: WorkerConfig, device: str) -> int | None:
    """Return the CPU threads of each rank: they share the cores unless told otherwise."""
    if config.num_threads is not None or config.num_ranks == 1 or device != "cpu":
        return config.num_threads
    return max(1, torch.get_num_threads() // config.num_ranks)


def _check_device(num_ranks: int, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {device!r} is one, which {num_ranks} ranks cannot share",
            fix="Use --device cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs.",
        )
    count = torch.cuda.device_count()
    if device == "cuda" and count < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need a GPU each, torch sees {count}",
            fix="Lower --tensor-parallel-size or --pipeline-parallel-size.",
        )
    if device == "cuda" and not dist.is_nccl_available():
        raise ConfigError(
            "this torch was built without NCCL, over which GPUs compute together",
            fix="Install torch for CUDA on Linux, or leave out --tensor-parallel-size.",
        )
