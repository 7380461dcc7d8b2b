"""Loads a model and builds the engine that serves it."""

import contextlib
import os
import socket
from collections.abc import Callable

import torch

from tidemill.protocol.codec import MAX_MESSAGE_BYTES, WIRE_VERSION
from tidemill.protocol.errors import ConfigError, DamagedModel
from tidemill.protocol.ids import new_worker_id
from tidemill.protocol.messages import ModelCard, WorkerInfo
from tidemill.protocol.sampling import ALL_LOGPROBS
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill.protocol.step_cost import StepFeatures
from tidemill.service.sampling_check import LOGPROB_BYTES
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import OutputProcessor
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.loading.context_fit import fitting_context
from tidemill_gpuworker.loading.generation_config import sampling_defaults
from tidemill_gpuworker.loading.model_choice import ModelSource, NativeSource, choose_model
from tidemill_gpuworker.loading.reasoning import reasoning_markers
from tidemill_gpuworker.lora.adapters import Adapters
from tidemill_gpuworker.lora.layers import AdaptableLayers
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.kv_cache import available_bytes
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.parallel.followers import NO_FOLLOWERS
from tidemill_gpuworker.parallel.setup import make_team, threads_per_rank
from tidemill_gpuworker.parallel.team import Team, device_of
from tidemill_gpuworker.sampling.sampler import LogprobsMode, Sampler
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler
from tidemill_gpuworker.structured_output.compiler import grammar_compiler

#: Bounds on the KV cache of a CPU worker that was not given a size: it shares the machine.
_CPU_CACHE_BYTES = 4 << 30
_CPU_CACHE_SHARE = 0.25

_CPU_STEP_TOKENS = 512
_GPU_STEP_TOKENS = 2048

#: What a chunk of one token takes on the wire beside its logprobs, with room to spare.
_CHUNK_BYTES = 4096
_GPU_SWAP_GIB = 4.0


def load_model(
    config: WorkerConfig, on_step: Callable[[StepFeatures], None] = lambda step: None
) -> ServedModel:
    """Load the model and warm it up; its engine will tell ``on_step`` of each step.

    Raises ``ModelError`` if the directory cannot be served, ``ConfigError`` if a setting does not
    fit the model or the device.
    """
    device = _device(config.device)
    team = make_team(config, device)
    with contextlib.ExitStack() as on_failure:
        if team is not None:
            on_failure.callback(team.close)
        model = _load_model(config, on_step, device, team)
        on_failure.pop_all()
    return model


def _load_model(
    config: WorkerConfig,
    on_step: Callable[[StepFeatures], None],
    device: str,
    team: Team | None,
) -> ServedModel:
    source = choose_model(config.model_dir, config.model_impl)
    tokenizer = Tokenizer.from_directory(config.model_dir)
    # Before the weights are read, which takes long.
    defaults = sampling_defaults(config)
    runner = _runner(config, source, device, team)
    max_model_len = fitting_context(
        runner.max_model_len, config.max_model_len, runner.num_blocks, config.block_size
    )
    _check_eos(config, runner, tokenizer)
    _check_max_logprobs(config.max_logprobs, runner.model_config.vocab_size)
    step_config = _step_config(config, device, max_model_len)
    runner.warm_up()
    adapters = None
    if config.lora is not None:
        adapters = Adapters(config.lora, runner.load_adapter, runner.check_adapter)
    return ServedModel(
        engine=_engine(config, step_config, runner, tokenizer, on_step),
        tokenizer=tokenizer,
        card=_card(config, runner, tokenizer, max_model_len, defaults),
        info=_info(config, step_config, runner),
        grammars=grammar_compiler(tokenizer, runner.model_config.vocab_size),
        ranks=team,
        adapters=adapters,
    )


def _runner(
    config: WorkerConfig, source: ModelSource, device: str, team: Team | None
) -> ModelRunner:
    speculation = config.speculative_config
    max_model_len = config.max_model_len or source.model_config.max_model_len
    return ModelRunner(
        config.model_dir,
        device=device if team is None else device_of(device, 0),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks_override,
        kv_cache_bytes=_cache_bytes(config, device),
        memory_utilization=config.gpu_memory_utilization,
        swap_space_bytes=_swap_space_bytes(config, device),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_step_tokens(config, device, max_model_len),
        num_drafted=speculation.num_speculative_tokens if speculation else 0,
        max_model_len=config.max_model_len,
        num_threads=threads_per_rank(config, device),
        source=source,
        quantization=config.quantization,
        followers=team or NO_FOLLOWERS,
        adaptable=_adaptable_layers(config, source),
    )


def _adaptable_layers(config: WorkerConfig, source: ModelSource) -> AdaptableLayers | None:
    if config.lora is None:
        return None
    if not isinstance(source, NativeSource):
        raise ConfigError(
            "adapters work for native models only, and this one is computed by transformers",
            fix="Leave out --enable-lora, or merge the adapter into the model's weights.",
        )
    return AdaptableLayers()


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _cache_bytes(config: WorkerConfig, device: str) -> int | None:
    if config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None:
        return config.kv_cache_memory_bytes
    if device != "cpu":
        return None
    share = _CPU_CACHE_SHARE * available_bytes(torch.device(device))
    return min(_CPU_CACHE_BYTES, int(share)) // config.num_ranks


def _check_eos(config: WorkerConfig, runner: ModelRunner, tokenizer: Tokenizer) -> None:
    vocab_size = runner.model_config.vocab_size
    strange = [token_id for token_id in tokenizer.eos_token_ids if token_id >= vocab_size]
    if strange:
        raise DamagedModel(
            f"{config.model_dir}: eos_token_id {strange[0]} is outside the vocabulary of"
            f" {vocab_size}",
            fix="Fetch the model again; tokenizer and weights must be of the same model.",
        )


def _check_max_logprobs(max_logprobs: int, vocab_size: int) -> None:
    most = vocab_size if max_logprobs == ALL_LOGPROBS else min(max_logprobs, vocab_size)
    limit = (MAX_MESSAGE_BYTES - _CHUNK_BYTES) // LOGPROB_BYTES
    if most > limit:
        raise ConfigError(
            f"max_logprobs: those of {most} tokens do not fit in a message of the wire",
            fix=f"Set --max-logprobs to {limit} or fewer.",
        )


def _step_config(config: WorkerConfig, device: str, max_model_len: int) -> StepConfig:
    return StepConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_step_tokens(config, device, max_model_len),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduling_mode=config.scheduling_mode,
        tpot_slo_seconds=config.tpot_slo_ms / 1000,
    )


def _step_tokens(config: WorkerConfig, device: str, max_model_len: int) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    default = _CPU_STEP_TOKENS if device == "cpu" else _GPU_STEP_TOKENS
    # Without chunks the longest prompt is one of them.
    longest = 0 if config.enable_chunked_prefill else max_model_len
    return max(default, config.max_num_seqs, longest)


def _swap_space_bytes(config: WorkerConfig, device: str) -> int:
    """The size of the CPU tier, which is reached through the prefix cache's lookup alone."""
    if not config.enable_prefix_caching or config.scheduling_mode == "static":
        if config.swap_space or config.preemption_mode == "swap":
            raise ConfigError(
                "swapped blocks are found by the prefix cache, which is off",
                fix="Leave out --swap-space and --preemption-mode, or enable prefix caching "
                "and continuous scheduling.",
            )
        return 0
    swap_space = config.swap_space
    if swap_space is None:
        swap_space = 0.0 if device == "cpu" else _GPU_SWAP_GIB
    if config.preemption_mode == "swap" and not swap_space:
        raise ConfigError(
            "--preemption-mode swap has no swap space", fix="Give --swap-space, in GiB."
        )
    return int(swap_space * (1 << 30))


def _engine(
    config: WorkerConfig,
    step_config: StepConfig,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    on_step: Callable[[StepFeatures], None],
) -> Engine:
    blocks = BlockManager(
        runner.num_blocks,
        config.block_size,
        watermark=config.watermark,
        enable_prefix_caching=(
            config.enable_prefix_caching and config.scheduling_mode == "continuous"
        ),
        num_swap_blocks=runner.num_swap_blocks,
        swap_on_preemption=config.preemption_mode == "swap",
        window=runner.model_config.window,
    )

    def make_processor(seq: Sequence) -> OutputProcessor:
        return OutputProcessor(
            tokenizer,
            seq.params,
            prompt_len=seq.num_prompt_tokens,
            max_model_len=step_config.max_model_len,
            num_published_chars=seq.num_published_chars,
        )

    sampler = Sampler(
        tokenizer.eos_token_ids,
        gumbel_argmax=runner.backend.gumbel_argmax,
        logprobs_mode=LogprobsMode(config.logprobs_mode),
        markers=reasoning_markers(tokenizer, runner.model_config.vocab_size),
    )
    speculation = config.speculative_config
    drafter = Drafter(speculation, step_config.max_model_len) if speculation else None
    scheduler = StepScheduler(step_config, blocks, drafter)
    return Engine(runner, sampler, scheduler, make_processor, on_step=on_step)


def _card(
    config: WorkerConfig,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    max_model_len: int,
    defaults: SamplingDefaults,
) -> ModelCard:
    return ModelCard(
        name=config.served_model_name,
        revision=runner.revision,
        tokenizer_digest=tokenizer.digest,
        max_model_len=max_model_len,
        vocab_size=runner.model_config.vocab_size,
        block_size=config.block_size,
        eos_token_ids=tokenizer.eos_token_ids,
        max_logprobs=config.max_logprobs,
        max_n=config.max_n,
        sampling_defaults=defaults,
        reasoning_ids=reasoning_markers(tokenizer, runner.model_config.vocab_size) or (),
    )


def _info(config: WorkerConfig, step_config: StepConfig, runner: ModelRunner) -> WorkerInfo:
    return WorkerInfo(
        worker_id=new_worker_id(),
        model=config.served_model_name,
        block_size=config.block_size,
        num_blocks=runner.num_blocks,
        max_num_seqs=step_config.max_num_seqs,
        max_num_batched_tokens=step_config.max_num_batched_tokens,
        wire_version=WIRE_VERSION,
        hostname=socket.gethostname(),
        pid=os.getpid(),
    )
