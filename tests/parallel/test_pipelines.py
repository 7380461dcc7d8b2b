"""Every native architecture over two ranks, two stages, and both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.golden_models import GOLDEN, make_golden_model, save_golden_model
from support.golden_runs import check_run, make_prompts
from support.greedy import generate_greedily
from support.quantised_models import write_quantised
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.parallel.team import Team
from tidemill_gpuworker.steps.step_config import StepConfig

pytestmark = pytest.mark.slow

HEADS_TOGETHER = {"olmo2", "olmo3"}


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2), (4, 1)], ids=str)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Ranks for each layer, and stages."""
    with Team(*request.param, num_threads=1) as team:
        yield team


@pytest.mark.parametrize("name", GOLDEN)
def test_ranks_and_stages_generate_what_transformers_does(
    name: str, team: Team, tmp_path: Path
) -> None:
    if name in HEADS_TOGETHER and not team.place.tensor.is_whole:
        pytest.skip("refused; see test_splits")
    model = make_golden_model(name)
    runner = ModelRunner(
        save_golden_model(model, tmp_path),
        dtype="float32",
        num_blocks=128,
        max_model_len=GOLDEN[name].max_model_len,
        num_threads=1,
        followers=team,
    )
    prompts = make_prompts((3, 21, 71), shared=41)
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)
    check_run(model, prompts, generate_greedily(runner, prompts, 8, config))


@pytest.mark.parametrize(
    "name", ["gptq v1", "awq a plain layer", "fp8 blocks", "squeezellm sparse"]
)
def test_ranks_and_stages_run_quantised_checkpoints(name: str, team: Team, tmp_path: Path) -> None:
    model = write_quantised(name, tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", num_blocks=32, num_threads=1, followers=team)
    config = StepConfig(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = make_prompts((5, 23), shared=20)
    check_run(model, prompts, generate_greedily(runner, prompts, 4, config))
