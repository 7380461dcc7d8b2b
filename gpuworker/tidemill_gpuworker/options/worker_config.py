"""The settings of one worker process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE
from tidemill.protocol.sampling import DEFAULT_MAX_LOGPROBS, DEFAULT_MAX_N
from tidemill.service.config import ServiceConfig
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.steps.step_config import SchedulingMode

PreemptionMode = Literal["recompute", "swap"]
ModelImpl = Literal["auto", "native", "transformers"]
#: Ways to keep weights in memory, and names of ``quant_method`` in config.json.  Here because the
#: command line is read before torch is loaded; ``quantization.selection`` is held to them.
QUANTIZATIONS = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gptq",
    "int4",
    "int8",
    "squeezellm",
)
#: ``kv_cache.KV_DTYPES`` is held to them.
KV_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")
#: Of the KV cache; those of the kernels are held to them.
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How one model is served; names and meanings of the engine's settings are vLLM's.

    A None is decided when device and model are known.  ``model`` is what the command line says;
    until it is found, by ``model_finder``, ``model_dir`` is no more than that as a path.
    """

    model_dir: Path
    served_model_name: str
    redis_url: str
    service: ServiceConfig
    model: str = ""
    task: str = "auto"
    model_impl: ModelImpl = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduling_mode: SchedulingMode = "continuous"
    enforce_eager: bool = False
    lora: LoraConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    tpot_slo_ms: float = 0.0
    max_model_len: int | None = None
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    max_n: int = DEFAULT_MAX_N
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    swap_space: float | None = None
    preemption_mode: PreemptionMode = "recompute"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_threads: int | None = None
    metrics_port: int | None = None
    vllm_metrics: bool = False
    max_step_seconds: float = 60.0
    drain_seconds: float = 30.0
    retry_seconds: float = 1.0
    max_retry_seconds: float = 60.0
    step_log: Path | None = None
    ready_fd: int | None = None

    @property
    def num_ranks(self) -> int:
        """Processes that the model is split over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
