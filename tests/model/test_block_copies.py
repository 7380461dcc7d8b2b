"""Copies of KV blocks on real tensors, and the tokens of a real model that lives on them."""

from pathlib import Path

import pytest
import torch

from support.fake_engine import FakeProcessor
from support.greedy import reference_outputs
from support.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copier import BlockCopier
from tidemill_gpuworker.memory.block_copies import BlockCopies, BlockCopy
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.kv_cache import KVCache, num_swap_blocks_in
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler
from tidemill_kernels import KVScales
from tidemill_kernels.kv_scales import LARGEST

NUM_TOKENS = 24
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def make_cache(dtype: torch.dtype, *, num_blocks: int = 6) -> KVCache:
    """A cache of two layers of different shapes, every value different from its neighbours."""

    def tensor(number: int, heads: int, width: int) -> torch.Tensor:
        values = torch.arange(num_blocks * heads * 4 * width).reshape(num_blocks, heads, 4, width)
        return ((values * 7 + number) % 97).to(dtype)

    def scales(number: int, heads: int) -> KVScales:
        return KVScales(*(tensor(number + i, heads, 1)[..., 0].float() for i in range(2)))

    return KVCache(
        keys=(tensor(0, 2, 8), tensor(1, 3, 4)),
        values=(tensor(2, 2, 8), tensor(3, 3, 4)),
        scales=(scales(4, 2), scales(6, 3)) if dtype in LARGEST else (),
    )


def contents(cache: KVCache) -> list[list[torch.Tensor]]:
    """All tensors, block by block."""
    scales = [tensor for pair in cache.scales for tensor in (pair.keys, pair.values)]
    tensors = (*cache.keys, *cache.values, *scales)
    return [[t[block].float().clone() for t in tensors] for block in range(cache.num_blocks)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reads_come_before_the_writes_that_would_spoil_them(dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    copier, before = BlockCopier(cache, 3), contents(cache)
    copier.run(BlockCopies(outs=(BlockCopy(0, 2), BlockCopy(5, 0))))

    # Block 4 leaves, gets what block 3 had, which gets what block 0 had had: slot 2.
    copier.run(
        BlockCopies(
            outs=(BlockCopy(4, 1),),
            forks=(BlockCopy(3, 4), BlockCopy(2, 1)),
            ins=(BlockCopy(2, 3), BlockCopy(1, 0), BlockCopy(0, 2)),
        )
    )

    after = contents(cache)
    for block, source in enumerate([4, 2, 5, 0, 3, 5]):
        assert all(map(torch.equal, after[block], before[source])), f"block {block}"


def test_swap_space_that_does_not_fit_into_memory_is_refused() -> None:
    assert num_swap_blocks_in(1000, 300) == 3
    with pytest.raises(ConfigError, match="does not fit"):
        num_swap_blocks_in(1 << 60, 300)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (40, 31) * 4]


def generate(
    model_dir: Path,
    block_size: int,
    *,
    swaps: bool,
    kv_dtype: str = "auto",
    num_tokens: int = 176,
    num_seqs: int = 8,
) -> tuple[StepScheduler, list[list[int]]]:
    """Generate for all prompts with room for ``num_tokens``, swapping what does not fit."""
    num_blocks = num_tokens // block_size
    runner = ModelRunner(
        model_dir,
        dtype="float32",
        kv_cache_dtype=kv_dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        swap_space_bytes=1 << 22,
        num_threads=2,
    )
    blocks = BlockManager(
        num_blocks,
        block_size,
        watermark=0.0,
        num_swap_blocks=runner.num_swap_blocks,
        swap_on_preemption=swaps,
    )
    config = StepConfig(max_model_len=160, max_num_batched_tokens=64, max_num_seqs=num_seqs)
    scheduler = StepScheduler(config, blocks)
    engine = Engine(runner, Sampler(()), scheduler, lambda seq: FakeProcessor(NUM_TOKENS))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    seqs = [Sequence(str(n), prompt, params, seed=0) for n, prompt in enumerate(make_prompts())]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        engine.step()
        scheduler.check_integrity()
    return scheduler, [seq.output_ids for seq in seqs]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_swapped_sequences_of_a_quantised_cache_generate_what_each_does_alone(
    kv_dtype: str, tmp_path: Path
) -> None:
    save_tiny_model("llama-tied", tmp_path)
    scheduler, crowded = generate(tmp_path, 4, swaps=True, kv_dtype=kv_dtype)
    assert scheduler.block_manager.num_swapped_in >= 3
    roomy, alone = generate(
        tmp_path, 4, swaps=False, kv_dtype=kv_dtype, num_tokens=1000, num_seqs=1
    )
    assert roomy.block_manager.num_swapped_in == 0
    assert crowded == alone


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
def test_swapped_sequences_generate_the_tokens_of_transformers(
    block_size: int, swaps: bool, tmp_path: Path
) -> None:
    scheduler, outputs = generate(save_tiny_model("llama-tied", tmp_path), block_size, swaps=swaps)
    assert scheduler.num_preemptions >= 3
    assert scheduler.block_manager.num_swapped_in >= 3
    expected = reference_outputs(make_tiny_model("llama-tied"), make_prompts(), NUM_TOKENS)
    assert outputs == expected
