"""A worker's model over a KV cache of 8 bits, against transformers with such keys and values."""

from pathlib import Path

import pytest
import torch
import transformers

from support.golden_runs import make_prompts
from support.greedy import GreedyRun, generate_greedily, reference_logits
from support.quantised_attention import rounded_kv
from support.tiny_models import make_tiny_model, save_tiny_model
from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.model_config import load_model_config
from tidemill_gpuworker.memory.kv_cache import KV_DTYPES, bytes_per_block, num_blocks_in
from tidemill_gpuworker.options.worker_config import KV_CACHE_DTYPES
from tidemill_gpuworker.steps.step_config import StepConfig

NUM_TOKENS = 16
# One sequence at a time, its whole prompt in one step.
ROOMY = StepConfig(max_model_len=256, max_num_batched_tokens=1024, max_num_seqs=1)
TIGHT = StepConfig(max_model_len=256, max_num_batched_tokens=24, max_num_seqs=8)
NAMES = ["int8", "fp8_e4m3", "fp8_e5m2"]
#: Root mean square by which the cache may move logits, in their spread: twice what was seen.
MOST_MOVED = {"int8": 0.07, "fp8_e4m3": 0.3, "fp8_e5m2": 0.55}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_tiny_model("llama-tied")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-tied", tmp_path_factory.mktemp("model"))


def make_runner(model_dir: Path, name: str, *, num_blocks: int = 120) -> ModelRunner:
    return ModelRunner(
        model_dir,
        dtype="float32",
        kv_cache_dtype=name,
        block_size=4,
        num_blocks=num_blocks,
        num_threads=2,
    )


def run(model_dir: Path, name: str, config: StepConfig, *, num_blocks: int) -> GreedyRun:
    runner = make_runner(model_dir, name, num_blocks=num_blocks)
    prompts = make_prompts((40, 33, 57), shared=20)
    return generate_greedily(runner, prompts, NUM_TOKENS, config)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    name: str, model: transformers.PreTrainedModel, model_dir: Path
) -> None:
    prompts = make_prompts((40, 33, 57), shared=20)
    done = run(model_dir, name, TIGHT, num_blocks=60)
    assert done.num_preemptions > 0
    assert done.num_chunked > 0
    assert done.num_hit_tokens > 0
    for prompt, output, logits in zip(prompts, done.outputs, done.logits, strict=True):
        with rounded_kv(model, name):
            expected = reference_logits(model, prompt, output)
        assert output == expected.argmax(dim=-1).tolist()
        # An element next to the middle of two codes may fall on the other one.
        differences = (logits - expected).abs().amax(dim=-1)
        assert float(differences.median()) <= 1e-4
        assert float(differences.max()) <= 0.02 * float(expected.std())


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_cache_moves_logits_within_a_bound(
    name: str, model: transformers.PreTrainedModel, model_dir: Path
) -> None:
    prompts = make_prompts((40, 33, 57), shared=20)
    done = run(model_dir, name, TIGHT, num_blocks=200)
    moved = []
    for prompt, output, logits in zip(prompts, done.outputs, done.logits, strict=True):
        plain = reference_logits(model, prompt, output)
        moved.append(float((logits - plain).square().mean().sqrt() / plain.std()))
    assert 1e-3 < max(moved) <= MOST_MOVED[name]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_chunks_hits_or_preemptions(name: str, model_dir: Path) -> None:
    alone = run(model_dir, name, ROOMY, num_blocks=200)
    crowded = run(model_dir, name, TIGHT, num_blocks=60)
    assert alone.num_preemptions == alone.num_chunked == 0 < crowded.num_preemptions
    assert crowded.outputs == alone.outputs


def test_as_many_bytes_hold_more_blocks(model_dir: Path) -> None:
    config = load_model_config(model_dir)
    found = {
        dtype: num_blocks_in(1 << 22, config, 16, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    }
    # Of 16 elements a head, the scale takes 4 bytes beside them.
    assert found[torch.int8] == found[torch.float8_e4m3fn]
    assert found[torch.int8] == pytest.approx(found[torch.float32] * 64 / 20, abs=4)
    assert found[torch.int8] == pytest.approx(found[torch.bfloat16] * 32 / 20, abs=4)


@pytest.mark.parametrize("name", ["auto", *KV_CACHE_DTYPES])
def test_the_pool_takes_the_bytes_that_it_is_counted_at(name: str, model_dir: Path) -> None:
    runner = make_runner(model_dir, name, num_blocks=7)
    each = bytes_per_block(runner.model_config, 4, runner.kv_dtype)
    assert runner.memory_use().kv_cache == 7 * each
    assert runner.kv_dtype == KV_DTYPES.get(name, torch.float32)


def test_the_command_line_and_the_cache_know_the_same_dtypes() -> None:
    assert set(KV_CACHE_DTYPES) == set(KV_DTYPES)


def test_an_unknown_dtype_is_refused_with_the_choices(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="unknown KV cache dtype 'int4'"):
        make_runner(model_dir, "int4")
