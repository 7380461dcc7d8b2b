"""What a worker's settings of memory and steps make of its engine, with a real model."""

from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import make_seq
from support.tiny_models import save_tiny_model
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.errors import ConfigError
from tidemill.service.config import load_config
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.options.worker_config import WorkerConfig

GIB = 1 << 30


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model("llama-untied", tmp_path_factory.mktemp("model"))
    byte_level_tokenizer().raw.save(str(directory / "tokenizer.json"))
    return directory


def make_engine(model_dir: Path, **settings: Any) -> Engine:
    config = WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        device="cpu",
        **{"num_gpu_blocks_override": 40, **settings},
    )
    engine = load_model(config).engine
    assert isinstance(engine, Engine)
    return engine


def test_a_cpu_has_no_swap_space_unless_it_is_given_some(model_dir: Path) -> None:
    blocks = make_engine(model_dir).step_scheduler.block_manager
    assert (blocks.tier.num_slots, blocks.swap_on_preemption) == (0, False)


def test_swap_space_is_counted_in_gib_of_blocks(model_dir: Path) -> None:
    engine = make_engine(model_dir, swap_space=0.01, preemption_mode="swap")
    blocks = engine.step_scheduler.block_manager
    # 3 layers x 2 x 6 KV heads x 16 x 4 bytes a token, 16 tokens a block.
    assert blocks.tier.num_slots == int(0.01 * GIB) // (16 * 3 * 2 * 6 * 16 * 4)
    assert blocks.swap_on_preemption


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption_mode": "swap"}, "has no swap space"),
        ({"swap_space": 1.0, "enable_prefix_caching": False}, "prefix cache, which is off"),
        ({"swap_space": 1.0, "scheduling_mode": "static"}, "prefix cache, which is off"),
        ({"swap_space": 1e9}, "does not fit into"),
    ],
)
def test_swap_space_that_could_not_be_used_is_refused(
    model_dir: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(model_dir, **settings)


def test_without_chunks_a_step_holds_the_longest_prompt(model_dir: Path) -> None:
    config = make_engine(
        model_dir, enable_chunked_prefill=False, max_num_seqs=4, max_model_len=500
    ).step_scheduler.config
    assert not config.enable_chunked_prefill
    assert config.max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match="without chunked prefill"):
        make_engine(model_dir, enable_chunked_prefill=False, max_num_batched_tokens=100)


def test_static_batches_generate_the_same_tokens_in_reserved_room(model_dir: Path) -> None:
    outputs = []
    for mode in ("continuous", "static"):
        engine = make_engine(model_dir, scheduling_mode=mode, max_model_len=128, max_num_seqs=8)
        seqs = [make_seq(list(range(n, n + 30)), 4 + n) for n in range(7)]
        for seq in seqs:
            engine.add(seq)
        engine.step()
        if mode == "static":
            # 40 blocks hold five sequences of 128 tokens.
            assert [len(seq.block_table) for seq in engine.step_scheduler.running] == [8] * 5
        while engine.has_work:
            engine.step()
        outputs.append([seq.output_ids for seq in seqs])
    assert outputs[0] == outputs[1]
