"""Owns the model, its KV cache and the device: runs one step plan at a time."""

import logging
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.protocol.errors import ConfigError, DamagedModel
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.inputs import make_inputs
from tidemill_gpuworker.engine.prompt_scorer import score_prompts
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_choice import LoadOptions, Model, ModelSource, choose_model
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.lora.adapter_files import AdapterFiles
from tidemill_gpuworker.lora.layers import (
    AdaptableLayers,
    AdapterWeights,
    LoadedAdapter,
    hold,
    spans_of,
)
from tidemill_gpuworker.memory.block_copier import BlockCopier
from tidemill_gpuworker.memory.kv_cache import (
    KVCache,
    available_bytes,
    bytes_per_block,
    check_fits,
    choose_kv_dtype,
    make_kv_cache,
    num_blocks_in,
    num_swap_blocks_in,
)
from tidemill_gpuworker.memory.memory_profile import largest_step, measure_memory
from tidemill_gpuworker.models.linear import can_pack
from tidemill_gpuworker.parallel.followers import NO_FOLLOWERS, Followers, LoadOrder
from tidemill_gpuworker.parallel.leading_model import LeadingCopier, lead
from tidemill_gpuworker.parallel.split_config import largest_part
from tidemill_gpuworker.quantization.selection import choose_quantization
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_kernels import AttentionBackend, select_backend

_logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# A step this long makes every library build its kernels and allocate its buffers.
_WARM_UP_TOKENS = 64
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes taken: weights, KV pool when full, and the process's peak resident set."""

    weights: int
    kv_cache: int
    peak_resident: int


class ModelRunner:
    """Runs step plans on one device.

    Args:
        model_dir: a Hugging Face directory with config.json and safetensors weights.
        device: "cpu", "cuda" or "cuda:<n>".
        dtype: "float32", "bfloat16", "float16", or "auto" for what the weights were published in,
            where the device multiplies it natively, else float32.
        kv_cache_dtype: "fp8" (the same as "fp8_e4m3"), "fp8_e5m2" or "int8" for a quantised cache;
            "auto" for the dtype of the weights.
        block_size: tokens per KV block.
        num_blocks: blocks in the KV pool; or
        kv_cache_bytes: its size; or
        memory_utilization: on a CPU its share of the memory that is free once the weights are
            loaded; of a GPU the share that this process may use, for everything.
        swap_space_bytes: host memory for blocks that left the device.
        max_num_seqs: sequences, and
        max_num_batched_tokens: tokens of the largest step, which a GPU needs room for, and
        num_drafted: those of a sequence that are guesses and give logits too.
        max_model_len: longest context; None for the one the model was made for.
        num_threads: CPU threads of torch and the kernels, for the whole process; None leaves them.
        source: the model as ``choose_model`` found it; None to find it in ``model_dir``.
        quantization: how the model must be quantised, or is to be while it is loaded; None for
            what its config.json says.
        adaptable: notes the layers that adapters may change; None if there are none.
        followers: processes that compute parts of the model; this one leads them then.

    Raises:
        ModelError: the directory cannot be served; the subclass says why.
        ConfigError: a setting does not fit the model or the device.
        EngineFailed: one of the followers could not do its part.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        memory_utilization: float = 0.5,
        swap_space_bytes: int = 0,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        num_drafted: int = 0,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        source: ModelSource | None = None,
        quantization: str | None = None,
        followers: Followers = NO_FOLLOWERS,
        adaptable: AdaptableLayers | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._source = source or choose_model(model_dir)
        self.model_config = self._source.model_config
        self.max_model_len = _context_limit(self.model_config, max_model_len)
        self._choose_numbers(device, dtype, kv_cache_dtype, block_size)
        self._model_dir, self._wanted_quantization = model_dir, quantization
        self._quantization = choose_quantization(model_dir, quantization)
        self._adaptable = adaptable
        self._lead(followers)
        free = int(available_bytes(self._device) * memory_utilization)
        self._model = self._load_model(kv_cache_bytes or free, num_blocks)
        if self._device.type == "cuda" and num_blocks is None and kv_cache_bytes is None:
            step = self._largest_step(max_num_seqs, max_num_batched_tokens, num_drafted)
            kv_cache_bytes = self._profile(step, memory_utilization)
        # What others gave back meanwhile is left alone: no position outgrows the model's tables.
        free = min(free, int(available_bytes(self._device) * memory_utilization))
        self._serve_from(self._make_cache(num_blocks, kv_cache_bytes or free), swap_space_bytes)

    def _choose_numbers(
        self, device: str, dtype: str, kv_cache_dtype: str, block_size: int
    ) -> None:
        self.block_size = block_size
        self._device = parse_device(device)
        self.dtype = choose_dtype(dtype, self.model_config, self._device)
        self.kv_dtype = choose_kv_dtype(kv_cache_dtype, self.dtype)
        self.backend = _backend(self._device, block_size)

    def _lead(self, followers: Followers) -> None:
        self._followers = followers
        self._part = self._source.split(followers.place)
        # Every rank has as many blocks as there is room for where they are largest.
        self._largest_part = largest_part(self._source.split, followers.place)

    def _largest_step(self, num_seqs: int, num_tokens: int, num_drafted: int) -> StepPlan:
        sizes = num_seqs, num_tokens, self.max_model_len, self.block_size
        return largest_step(*sizes, num_drafted=num_drafted)

    def _serve_from(self, cache: KVCache, swap_space_bytes: int) -> None:
        self._cache = cache
        each = bytes_per_block(self._largest_part, self.block_size, self.kv_dtype)
        self.num_swap_blocks = num_swap_blocks_in(swap_space_bytes, each)
        self._followers.make_cache(self.num_blocks, self.num_swap_blocks, self.kv_dtype)
        copier = BlockCopier(self._cache, self.num_swap_blocks)
        self._copier = LeadingCopier(copier, self._followers)
        _logger.info(
            "loaded %s as %s on %s: %d KV blocks of %d tokens as %s, %d bytes a token, %s kernels",
            *(self._model_dir.name, self.dtype, self._device),
            *(self.num_blocks, self.block_size, self.kv_dtype),
            *(each // self.block_size, self.backend.name),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        return self._cache.num_blocks

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Put the plan's tokens through the model.

        Returns float32 logits [rows, vocab_size] in the order of ``plan.sampling``, each item with
        a row for its last known token and one for each of its draft's,
        and extends the prompt logprobs of sequences that want them.
        """
        if not plan.scheduled:
            return torch.empty(0, self.model_config.vocab_size, device=self._device)
        if plan.copies:
            self._copier.run(plan.copies)
        inputs = make_inputs(plan, self.block_size, self._device)
        if self._adaptable is not None:
            spans = spans_of(plan.scheduled)
            self._adaptable.begin(spans, self._device)
            self._followers.adapt(spans)
        hidden = self._model(inputs, self._cache, self.backend)
        score_prompts(plan, hidden, self._model.logits, self.model_config.vocab_size)
        return self._model.logits(hidden[inputs.sampled_rows])

    def warm_up(self) -> None:
        """Run a prefill and a decode step over blocks that no sequence holds yet.

        Raises DamagedModel if the model computes something other than numbers.
        """
        room = self.num_blocks * self.block_size
        num_tokens = min(_WARM_UP_TOKENS, self.max_model_len, room)
        seq = Sequence("warm-up", [0] * num_tokens, SamplingParams(), seed=0)
        seq.block_table = list(range(-(-num_tokens // self.block_size)))
        for start in (0, num_tokens - 1):
            plan = StepPlan((ScheduledSequence(seq, start, num_tokens - start),))
            self._check_finite(self.execute(plan))

    def load_adapter(self, name: str, files: AdapterFiles) -> LoadedAdapter:
        """Bring an adapter to the device, in the model's dtype; any thread may.

        Raises as ``AdaptableLayers.load`` does.
        """
        if self._followers.place.is_whole:
            return self.check_adapter(name, files)
        # Read once, so that all ranks have the same weights.
        held = hold(files)
        loaded = self.check_adapter(name, held)
        self._followers.load_adapter(loaded, held)
        return loaded

    def check_adapter(self, name: str, weights: AdapterWeights) -> LoadedAdapter:
        """Bring this rank's part of an adapter to the device and return it; raises as above."""
        assert self._adaptable is not None, "the model was loaded without adapters"
        return self._adaptable.load(name, weights, self.dtype, self._device)

    def memory_use(self) -> MemoryUse:
        """Return what the weights and the pool take, and the process's peak so far."""
        return MemoryUse(self._weight_bytes, self._cache.num_bytes, peak_resident_bytes())

    @torch.inference_mode()
    def _profile(self, plan: StepPlan, utilization: float) -> int:
        # The step fills a cache of its own, which holds just the blocks that it names.
        num_blocks = max(len(item.seq.block_table) for item in plan.scheduled)
        cache = self._make_caches(num_blocks, self.kv_dtype)
        inputs = make_inputs(plan, self.block_size, self._device)

        def run_step() -> None:
            hidden = self._model(inputs, cache, self.backend)
            # Sorting is what sampling needs most memory for.
            self._model.logits(hidden[inputs.sampled_rows]).sort(dim=-1)

        profile = measure_memory(self._device, self._weight_bytes, run_step)
        _logger.info("%s", profile.describe(utilization))
        return profile.kv_cache_bytes(utilization)

    def _load_model(self, num_bytes: int, num_blocks: int | None) -> Model:
        checkpoint = Checkpoint(
            self._model_dir,
            dtype=self.dtype,
            device=self._device,
            quantization=self._quantization,
        )
        self.revision = checkpoint.revision()
        if self._adaptable is not None:
            checkpoint.wrap_linear = self._adaptable.wrap
        num_positions = min(self.max_model_len, self._most_tokens(num_bytes, num_blocks))
        self._followers.load(self._load_order(num_positions))
        options = LoadOptions(
            dtype=self.dtype,
            device=self._device,
            backend=self.backend,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_positions=num_positions,
            place=self._followers.place,
            ranks=self._followers.collectives,
        )
        part = self._source.load(checkpoint, options)
        model = lead(part, self.model_config.vocab_size, self._followers)
        self._followers.confirm()
        self._source.check(model, options, self._make_caches)
        self._weight_bytes = checkpoint.num_bytes
        _log_saving(checkpoint, self.dtype)
        return model

    def _load_order(self, num_positions: int) -> LoadOrder:
        return LoadOrder(
            model_dir=self._model_dir.absolute(),
            impl=self._source.impl,
            quantization=self._wanted_quantization,
            is_adaptable=self._adaptable is not None,
            dtype=str(self.dtype).removeprefix("torch."),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_positions=num_positions,
        )

    def _most_tokens(self, num_bytes: int, num_blocks: int | None) -> int:
        # What the KV pool will hold at most, and so the longest sequence.
        each = bytes_per_block(self._largest_part, self.block_size, self.kv_dtype)
        most = num_bytes // each if num_blocks is None else num_blocks
        return max(1, most) * self.block_size

    def _check_finite(self, logits: torch.Tensor) -> None:
        if not logits.isfinite().all():
            raise DamagedModel(
                f"{self._model_dir}: the weights give logits that are not finite in {self.dtype}",
                fix="Download the model again; if that is no help, choose the dtype float32.",
            )

    def _make_cache(self, num_blocks: int | None, num_bytes: int) -> KVCache:
        if num_blocks is None:
            sizes = self._largest_part, self.block_size, self.kv_dtype
            num_blocks = num_blocks_in(num_bytes, *sizes)
        return self._cache_of(num_blocks, self.kv_dtype)

    def _make_caches(self, num_blocks: int, dtype: torch.dtype) -> KVCache:
        """Let all ranks make a cache for what comes before serving; returns this one's."""
        self._followers.make_cache(num_blocks, 0, dtype)
        return self._cache_of(num_blocks, dtype)

    def _cache_of(self, num_blocks: int, dtype: torch.dtype) -> KVCache:
        size, device = self.block_size, self._device
        check_fits(num_blocks, self._largest_part, size, dtype, device)
        return make_kv_cache(
            self._part, num_blocks=num_blocks, block_size=size, dtype=dtype, device=device
        )


def parse_device(name: str) -> torch.device:
    """Return the device called ``name``; raises ConfigError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", fix="Choose cpu, cuda or cuda:N.") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device {name!r} is not supported", fix="Choose cpu, cuda or cuda:N.")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device {name!r} does not exist, torch sees {count} CUDA devices",
            fix="Choose cpu, or install a driver and a torch build for CUDA.",
        )
    return device


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that ``name`` stands for.

    Raises:
        ConfigError: an unknown name, or float16 on a CPU.
    """
    if name == "auto":
        published = DTYPES.get(config.dtype, torch.float32)
        is_native = device.type != "cpu" or can_pack(published)
        return published if is_native else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}", fix=f"Choose auto or one of {list(DTYPES)}.")
    if name == "float16" and device.type == "cpu":
        raise ConfigError("float16 does not run on the CPU", fix="Use bfloat16 or float32.")
    return DTYPES[name]


def peak_resident_bytes() -> int:
    """Return the largest resident set that this program has had."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss, the high-water mark starts anew at exec: a parent's size stays out.
        words = status.read_text().partition("VmHWM:")[2].split()
        return int(words[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _log_saving(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    if checkpoint.quantization is not None:
        _logger.info(
            "quantised by %s: layers of %.1f MiB take %.1f MiB less than as %s",
            checkpoint.quantization.method,
            checkpoint.quantized.num_bytes / _MIB,
            checkpoint.quantized.num_saved / _MIB,
            dtype,
        )


def _context_limit(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.default_model_len
    if not 1 <= wanted <= config.max_model_len:
        raise ConfigError(
            f"max_model_len {wanted} is outside 1 to {config.max_model_len}, the model's context",
            fix="Lower it.",
        )
    return wanted


def _backend(device: torch.device, block_size: int) -> AttentionBackend:
    backend = select_backend(device)
    if not backend.supports_block_size(block_size):
        raise ConfigError(
            f"block size {block_size} does not run on {device}",
            fix=f"Choose one of {sorted(backend.block_sizes)}."
            if backend.block_sizes
            else "Choose 1 or more.",
        )
    return backend
