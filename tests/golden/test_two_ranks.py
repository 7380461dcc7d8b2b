"""Models over two ranks, whoever computes their layers, against transformers and one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from support.golden_models import GOLDEN, NATIVE_ALONE, Golden, make_golden_model, save_golden_model
from support.golden_runs import check_run, make_prompts
from support.greedy import GreedyRun, generate_greedily
from support.transformers_models import CASES, make_config, save_case
from tidemill.protocol.errors import ConfigError, UnsupportedModel
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.model_choice import choose_model
from tidemill_gpuworker.options.worker_config import ModelImpl
from tidemill_gpuworker.parallel.followers import NO_FOLLOWERS, Followers
from tidemill_gpuworker.parallel.shard import Shard, place_of
from tidemill_gpuworker.parallel.team import Team
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.transformers_backend import source

#: What transformers has no plan for splitting.
WITHOUT_PLAN = (
    *("opt", "opt projected", "gpt2", "stablelm", "persimmon", "gpt bigcode", "biogpt"),
    *("bitnet", "hunyuan dense"),
)
#: Split heads and soft caps; heads that all ranks hold, beside split experts.
FAST_CASES = ("vaultgemma", "olmoe")
FAST_GOLDEN = ("gemma2",)
HEADS_TOGETHER = ("olmo2", "olmo3")
MOST = 16


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """Two ranks, which the tests give one model after another."""
    with Team(2, num_threads=1) as team:
        yield team


def make_runner(
    model_dir: Path,
    followers: Followers,
    impl: ModelImpl = "auto",
    max_model_len: int | None = None,
) -> ModelRunner:
    return ModelRunner(
        model_dir,
        dtype="float32",
        num_blocks=192,
        max_model_len=max_model_len,
        num_threads=1,
        source=choose_model(model_dir, impl),
        followers=followers,
    )


def run_chunks(runner: ModelRunner, prompts: list[list[int]]) -> GreedyRun:
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)
    return generate_greedily(runner, prompts, 5, config)


def check_chunks(
    model: transformers.PreTrainedModel, model_dir: Path, team: Team, impl: ModelImpl
) -> None:
    prompts = make_prompts((3, 21, 71), shared=41)
    alone = run_chunks(make_runner(model_dir, NO_FOLLOWERS, impl), prompts)
    split = run_chunks(make_runner(model_dir, team, impl), prompts)
    assert split.num_chunked > 0
    assert split.num_hit_tokens > 0
    assert split.outputs == alone.outputs
    print(f"{type(model).__name__}: {check_run(model, prompts, split):.1e}")


@pytest.mark.parametrize("name", FAST_CASES)
def test_two_ranks_run_a_model_of_transformers(name: str, team: Team, tmp_path: Path) -> None:
    check_chunks(save_case(CASES[name], tmp_path), tmp_path, team, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - {*FAST_CASES, *WITHOUT_PLAN}))
def test_two_ranks_run_every_model_that_transformers_can_split(
    name: str, team: Team, tmp_path: Path
) -> None:
    check_chunks(save_case(CASES[name], tmp_path), tmp_path, team, "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(GOLDEN.keys() - {"phi3 longrope long", "gpt oss", *NATIVE_ALONE})
)
def test_two_ranks_run_every_native_family_on_transformers(
    name: str, team: Team, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    check_chunks(model, save_golden_model(model, tmp_path), team, "transformers")


def check_batches(
    model: transformers.PreTrainedModel,
    model_dir: Path,
    team: Team,
    golden: Golden = GOLDEN["llama untied"],
) -> None:
    # One output after another ends, so that steps of all sizes are computed.
    lengths = (1, 2, 3, 15, 16, 17, 20, 31, 32, 33, 34, 64, 65, 97)
    prompts, counts = make_prompts(lengths, shared=70), range(3, MOST + 3)
    config = StepConfig(max_model_len=256, max_num_batched_tokens=1024, max_num_seqs=MOST)
    runs = []
    for followers in (NO_FOLLOWERS, team):
        runner = make_runner(model_dir, followers, max_model_len=golden.max_model_len)
        run = generate_greedily(runner, prompts, counts, config)
        assert run.decode_sizes == set(range(1, MOST + 1))
        print(f"{type(model).__name__}: {check_run(model, prompts, run, golden.atol):.1e}")
        runs.append(run)
    assert runs[0].outputs == runs[1].outputs


@pytest.mark.parametrize("name", FAST_GOLDEN)
def test_batches_of_1_to_16_are_alike_over_one_and_two_ranks(
    name: str, team: Team, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    check_batches(model, save_golden_model(model, tmp_path), team, GOLDEN[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {*FAST_GOLDEN, *HEADS_TOGETHER}))
def test_batches_of_1_to_16_are_alike_over_one_and_two_ranks_in_every_family(
    name: str, team: Team, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    check_batches(model, save_golden_model(model, tmp_path), team, GOLDEN[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cohere2", "deepseek v2", "gpt neox", "olmoe", "nemotron"])
def test_batches_of_1_to_16_are_alike_over_one_and_two_ranks_on_transformers(
    name: str, team: Team, tmp_path: Path
) -> None:
    check_batches(save_case(CASES[name], tmp_path), tmp_path, team)


def test_a_plan_that_computes_something_else_is_found_before_serving(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_case(CASES["vaultgemma"], tmp_path)
    split_model = source.split_model
    # Both ranks hold the same half then.
    monkeypatch.setattr(
        source, "split_model", lambda model, _, ranks: split_model(model, Shard(1, 2), ranks)
    )
    with pytest.raises(UnsupportedModel, match="split over 2 ranks, its logits differ"):
        make_runner(tmp_path, team)


def save_config(name: str, directory: Path) -> Path:
    make_config(CASES[name]).save_pretrained(directory)
    return directory


def test_a_model_that_transformers_has_no_plan_for_is_refused_by_name(tmp_path: Path) -> None:
    chosen = choose_model(save_config("opt", tmp_path))
    assert chosen.split(place_of(0, 1, 1)) == chosen.model_config
    with pytest.raises(UnsupportedModel, match=r"OPTForCausalLM cannot be split .* has no plan"):
        chosen.split(place_of(0, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_every_other_model_without_a_plan_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="has no plan"):
        choose_model(save_config(name, tmp_path)).split(place_of(0, 2, 1))


@pytest.mark.parametrize(
    ("name", "ranks", "named"),
    [
        ("cohere", 4, "num_key_value_heads 2"),
        ("cohere", 3, "num_attention_heads 4"),
        ("olmoe", 5, r"model\.layers\.0\.self_attn\.q_proj 64"),
        ("granite moe", 5, r"experts\.gate_up_proj 96"),
    ],
)
def test_a_size_that_ranks_cannot_share_is_named(
    name: str, ranks: int, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} does not divide .*{named}"):
        choose_model(save_config(name, tmp_path)).split(place_of(0, ranks, 1))


def test_models_on_transformers_have_no_stages(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no pipeline stages"):
        choose_model(save_config("cohere", tmp_path)).split(place_of(0, 1, 2))
