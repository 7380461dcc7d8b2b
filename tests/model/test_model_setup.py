"""What the settings of a worker make of its engine, with a real model."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import make_seq
from support.tiny_models import save_tiny_model
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.errors import ConfigError, DamagedModel
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill.service.config import load_config
from tidemill.service.step_log import StepLog, read_step_log
from tidemill_gpuworker.loading import model_setup
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.options.worker_config import WorkerConfig


def test_logprobs_that_no_message_holds_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = save_tiny_model("llama-untied", tmp_path / "model")
    byte_level_tokenizer().raw.save(str(model_dir / "tokenizer.json"))
    config = WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        device="cpu",
        num_gpu_blocks_override=8,
        max_logprobs=-1,
    )
    assert load_model(config).card.max_logprobs == -1
    # As if the vocabulary of 512 were one of 100,000 tokens.
    monkeypatch.setattr(model_setup, "MAX_MESSAGE_BYTES", 4096 + 512 * 14)
    with pytest.raises(ConfigError, match="those of 512 tokens do not fit"):
        load_model(config)


def config_of(model_dir: Path, **settings: Any) -> WorkerConfig:
    byte_level_tokenizer().raw.save(str(model_dir / "tokenizer.json"))
    return WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        device="cpu",
        **settings,
    )


def test_a_cache_smaller_than_the_context_shortens_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = save_tiny_model("llama-untied", tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        served = load_model(config_of(model_dir, num_gpu_blocks_override=8))
    assert served.card.max_model_len == 128
    assert "it is served with --max-model-len 128" in caplog.text
    # As a job without max_tokens: it ends where the cache does.
    seq = make_seq([5] * 100, None)
    served.engine.add(seq)
    while served.engine.has_work:
        served.engine.step()
    assert seq.num_tokens <= 128
    assert served.engine.step_scheduler.block_manager.usage == 0.0


def test_a_context_that_was_asked_for_must_fit_into_the_cache(tmp_path: Path) -> None:
    model_dir = save_tiny_model("llama-untied", tmp_path / "model")
    with pytest.raises(ConfigError, match="max_model_len 129: the KV cache holds 128") as caught:
        load_model(config_of(model_dir, num_gpu_blocks_override=8, max_model_len=129))
    assert "Set --max-model-len to 128 or less" in caught.value.fix
    served = load_model(config_of(model_dir, num_gpu_blocks_override=8, max_model_len=128))
    assert served.card.max_model_len == 128


def test_the_card_tells_the_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    model_dir = save_tiny_model("llama-untied", tmp_path / "model")
    path = model_dir / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True}))
    served = load_model(config_of(model_dir, num_gpu_blocks_override=8))
    assert served.card.sampling_defaults == SamplingDefaults(temperature=0.6, top_k=20)
    path.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(DamagedModel, match="temperature"):
        load_model(config_of(model_dir, num_gpu_blocks_override=8))


def test_every_step_of_a_real_model_is_logged_and_bounded_in_time(tmp_path: Path) -> None:
    model_dir = save_tiny_model("llama-untied", tmp_path / "model")
    byte_level_tokenizer().raw.save(str(model_dir / "tokenizer.json"))
    config = WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        device="cpu",
        num_gpu_blocks_override=64,
        # Less than the base alone: beside a decode each step gets one block of prefill.
        tpot_slo_ms=1e-6,
    )
    path = tmp_path / "steps.jsonl"
    with StepLog(path) as log:
        engine = load_model(config, log.write).engine
        engine.add(make_seq([5] * 20, 6))
        engine.step()
        engine.add(make_seq([7] * 40, 1))
        while engine.has_work:
            engine.step()
    steps = read_step_log(path)
    assert len(steps) == engine.figures.num_steps
    assert [step.prefill_tokens for step in steps[:4]] == [20, 16, 16, 8]
    assert [step.decode_tokens for step in steps[:4]] == [0, 1, 1, 1]
    assert [step.prefill_pairs for step in steps[:3]] == [190, 120, 16 * 16 + 120]
    assert [step.context_tokens for step in steps[:4]] == [0, 21, 22, 23]
    assert sum(step.seconds for step in steps) == engine.figures.total_step_seconds > 0
