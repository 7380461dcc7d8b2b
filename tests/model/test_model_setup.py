"""What the settings of a worker make of its engine, with a real model."""

from pathlib import Path

import pytest

from support.fake_engine import make_seq
from support.tiny_models import save_tiny_model
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.errors import ConfigError
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
