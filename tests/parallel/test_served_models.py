"""Models as a worker of two ranks loads them: from its settings to tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.fake_engine import make_seq
from support.golden_models import make_golden_model, save_golden_model
from support.greedy import reference_outputs
from support.lora_files import merged, write_adapter
from support.tiny_tokenizers import byte_level_tokenizer
from support.transformers_models import CASES, save_case
from tidemill.protocol.errors import UnsupportedModel
from tidemill.service.config import load_config
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.options.worker_config import WorkerConfig

# Each of them starts a rank of its own.
pytestmark = pytest.mark.slow

PROMPT = [5, 300, 7, 12]
NUM_TOKENS = 6


def load(model_dir: Path, **options: Any) -> ServedModel:
    byte_level_tokenizer().raw.save(str(model_dir / "tokenizer.json"))
    config = WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_gpu_blocks_override=32,
        tensor_parallel_size=2,
        **options,
    )
    return load_model(config)


def generate(served: ServedModel, seq: Sequence) -> list[int]:
    served.engine.add(seq)
    while served.engine.has_work:
        served.engine.step()
    return seq.output_ids


def expected(model: transformers.PreTrainedModel) -> list[int]:
    return reference_outputs(model, [PROMPT], NUM_TOKENS)[0]


def test_a_worker_splits_a_model_of_transformers(tmp_path: Path) -> None:
    model = save_case(CASES["cohere"], tmp_path)
    served = load(tmp_path)
    assert served.ranks is not None
    with served.ranks:
        assert generate(served, make_seq(PROMPT, NUM_TOKENS)) == expected(model)


def test_a_worker_splits_adapters_that_it_finds(tmp_path: Path) -> None:
    model = make_golden_model("llama untied")
    model_dir = save_golden_model(model, tmp_path / "model")
    path = write_adapter(tmp_path / "adapters" / "poet", model, ("q_proj", "o_proj", "down_proj"))
    served = load(model_dir, lora=LoraConfig(directory=tmp_path / "adapters"))
    assert served.ranks is not None
    with served.ranks:
        assert served.adapters is not None
        seq = make_seq(PROMPT, NUM_TOKENS)
        seq.adapter = served.adapters.get("poet")
        adapted = generate(served, seq)
        plain = generate(served, make_seq(PROMPT, NUM_TOKENS))
    assert plain == expected(model)
    assert adapted == expected(merged(model, path, scale=2.0))
    assert adapted != plain


def test_the_check_before_serving_has_plain_caches_whatever_serves(tmp_path: Path) -> None:
    model = save_case(CASES["cohere"], tmp_path)
    served = load(tmp_path, kv_cache_dtype="int8")
    assert served.ranks is not None
    with served.ranks:
        tokens = generate(served, make_seq(PROMPT, NUM_TOKENS))
    assert tokens[:1] == expected(model)[:1]


def test_a_worker_that_cannot_split_its_model_leaves_no_rank(tmp_path: Path) -> None:
    save_case(CASES["opt"], tmp_path)
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM cannot be split"):
        load(tmp_path)
    assert not torch.distributed.is_initialized()
