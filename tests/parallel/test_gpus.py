"""Ranks on GPUs of their own, over NCCL, against transformers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.golden_models import make_golden_model, save_golden_model
from support.golden_runs import check_run, make_prompts
from support.greedy import generate_greedily
from tidemill.protocol.errors import EngineFailed
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.parallel.team import Team
from tidemill_gpuworker.steps.step_config import StepConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CONFIG = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)


@pytest.fixture(params=[(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Two ranks, on the first two GPUs."""
    with Team(*request.param, device="cuda") as team:
        yield team


def make_runner(name: str, model_dir: Path, team: Team) -> ModelRunner:
    save_golden_model(make_golden_model(name), model_dir)
    return ModelRunner(model_dir, device="cuda:0", dtype="float32", num_blocks=128, followers=team)


@pytest.mark.parametrize("name", ["llama untied", "qwen3", "mixtral", "llama4"])
def test_two_gpus_generate_what_transformers_does(name: str, team: Team, tmp_path: Path) -> None:
    prompts = make_prompts((3, 21, 71), shared=41)
    run = generate_greedily(make_runner(name, tmp_path, team), prompts, 8, CONFIG)
    assert run.num_hit_tokens > 0
    run.logits = [logits.cpu() for logits in run.logits]
    check_run(make_golden_model(name), prompts, run)


def test_a_killed_rank_ends_the_work_of_the_other_gpu(team: Team, tmp_path: Path) -> None:
    runner = make_runner("llama untied", tmp_path, team)
    prompts = make_prompts((3, 21), shared=5)
    generate_greedily(runner, prompts, 2, CONFIG)
    os.kill(team.pids[0], signal.SIGKILL)
    with pytest.raises(EngineFailed):
        generate_greedily(runner, prompts, 40, CONFIG)
