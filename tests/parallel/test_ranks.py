"""A model over two processes: the tokens of one, and the end of both."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support.golden_models import make_golden_model, save_golden_model
from support.golden_runs import check_run, make_prompts
from support.greedy import GreedyRun, generate_greedily
from support.lora_files import merged, write_adapter
from support.quantised_models import ACT_ORDER, FORMATS, make_plain_model, write_quantised
from support.wait import wait_until
from tidemill.protocol.errors import EngineFailed
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import Output
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.stop_checker import Finish
from tidemill_gpuworker.lora.adapter_files import read_adapter
from tidemill_gpuworker.lora.layers import AdaptableLayers
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.parallel.collectives import ProcessGroup
from tidemill_gpuworker.parallel.followers import NO_FOLLOWERS, Followers
from tidemill_gpuworker.parallel.team import Team
from tidemill_gpuworker.quantization.on_the_fly import ON_THE_FLY
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """Two ranks, which the tests give one model after another."""
    with Team(2, num_threads=1) as team:
        yield team


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    return save_golden_model(make_golden_model("llama untied"), directory)


def make_runner(model_dir: Path, followers: Followers, **options: Any) -> ModelRunner:
    sizes = {"num_blocks": 64} | options
    runner = ModelRunner(
        model_dir,
        dtype="float32",
        num_threads=1,
        followers=followers,
        **sizes,
    )
    runner.warm_up()
    return runner


@pytest.mark.parametrize("name", ["llama untied", "qwen3", "mixtral"])
def test_two_ranks_generate_the_tokens_of_one(name: str, team: Team, tmp_path: Path) -> None:
    model = make_golden_model(name)
    model_dir = save_golden_model(model, tmp_path)
    prompts = make_prompts((3, 21, 71), shared=41)
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)

    alone = generate_greedily(make_runner(model_dir, NO_FOLLOWERS), prompts, 5, config)
    split = generate_greedily(make_runner(model_dir, team), prompts, 5, config)

    assert split.num_chunked > 0
    assert split.num_hit_tokens > 0
    assert split.outputs == alone.outputs
    check_run(model, prompts, split)


class Counting:
    """Ends an output after ``NUM_TOKENS``; has no text."""

    def __init__(self, seq: Sequence) -> None:
        self._num_left = NUM_TOKENS

    def process(self, token_id: int) -> Output:
        self._num_left -= 1
        return Output("", None if self._num_left else Finish(FinishReason.LENGTH))

    def replay(self, token_ids: list[int]) -> Output:
        raise AssertionError("nothing was generated before")


@dataclass
class Told:
    """What an engine said of its sequences."""

    outputs: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    prompts: list[list[TokenLogprobs | None]]
    num_swapped_in: int


def make_engine(runner: ModelRunner, max_num_seqs: int = 8) -> Engine:
    config = StepConfig(max_model_len=128, max_num_batched_tokens=48, max_num_seqs=max_num_seqs)
    blocks = BlockManager(
        runner.num_blocks,
        runner.block_size,
        num_swap_blocks=runner.num_swap_blocks,
        swap_on_preemption=runner.num_swap_blocks > 0,
    )
    return Engine(runner, Sampler(), StepScheduler(config, blocks), Counting)


def make_sequences(**options: object) -> list[Sequence]:
    fields = {"temperature": 0.9, "top_p": 0.95, "max_tokens": NUM_TOKENS, "logprobs": 2}
    params = SamplingParams.model_validate(fields | options)
    prompts = make_prompts((40, 33, 57), shared=20)
    return [Sequence(str(i), list(ids), params, seed=i) for i, ids in enumerate(prompts)]


def run_sampled(runner: ModelRunner) -> Told:
    engine = make_engine(runner)
    scored = make_sequences(prompt_logprobs=1)[:1]
    # The same prompts once more find their blocks in host memory, where others have sent them.
    rounds = [scored + make_sequences()[1:], make_sequences()]
    told: list[list[TokenLogprobs]] = []
    for seqs in rounds:
        for seq in seqs:
            engine.add(seq)
        logprobs: dict[str, list[TokenLogprobs]] = {seq.seq_id: [] for seq in seqs}
        while engine.has_work:
            for output in engine.step():
                logprobs[output.seq.seq_id] += output.logprobs or ()
        told += logprobs.values()
    return Told(
        [seq.output_ids for seqs in rounds for seq in seqs],
        told,
        [list(scored[0].prompt_logprobs)],
        engine.step_scheduler.kv_use.swapped_in,
    )


def own_logprobs(told: Told) -> torch.Tensor:
    rows = [*told.logprobs, *told.prompts]
    return torch.tensor([entry.logprob for row in rows for entry in row if entry is not None])


def test_two_ranks_sample_the_same_tokens_after_swaps(team: Team, llama_dir: Path) -> None:
    options = {"num_blocks": 9, "swap_space_bytes": 1 << 20}
    alone = run_sampled(make_runner(llama_dir, NO_FOLLOWERS, **options))
    split = run_sampled(make_runner(llama_dir, team, **options))

    assert split.num_swapped_in > 0
    assert split.outputs == alone.outputs
    torch.testing.assert_close(own_logprobs(split), own_logprobs(alone), atol=1e-4, rtol=0.0)


def run_short(runner: ModelRunner) -> GreedyRun:
    config = StepConfig(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4)
    return generate_greedily(runner, make_prompts((5, 23), shared=20), 4, config)


def check_quantised(model_dir: Path, team: Team, method: str | None = None) -> None:
    alone, split = (
        run_short(make_runner(model_dir, followers, quantization=method))
        for followers in (NO_FOLLOWERS, team)
    )
    assert split.outputs == alone.outputs
    for logits, expected in zip(split.logits, alone.logits, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0.0)


def test_two_ranks_run_a_quantised_checkpoint(team: Team, tmp_path: Path) -> None:
    write_quantised("gptq v1", tmp_path)
    check_quantised(tmp_path, team)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ACT_ORDER])
def test_two_ranks_run_every_quantised_checkpoint(name: str, team: Team, tmp_path: Path) -> None:
    write_quantised(name, tmp_path)
    check_quantised(tmp_path, team)


def test_two_ranks_quantise_as_one_does(team: Team, tmp_path: Path) -> None:
    make_plain_model().save_pretrained(tmp_path)
    check_quantised(tmp_path, team, "int4")


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_THE_FLY)
@pytest.mark.parametrize("name", ["llama untied", "phi3", "mixtral", "qwen2 moe"])
def test_two_ranks_quantise_fused_layers_and_experts_as_one_does(
    name: str, method: str, team: Team, tmp_path: Path
) -> None:
    check_quantised(save_golden_model(make_golden_model(name), tmp_path), team, method)


def check_adapters(name: str, modules: tuple[str, ...], team: Team, directory: Path) -> None:
    model = make_golden_model(name)
    model_dir = save_golden_model(model, directory / "model")
    runner = make_runner(model_dir, team, adaptable=AdaptableLayers())
    prompts = make_prompts((9, 40, 33), shared=20)
    config = StepConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=48)
    # The first ones are gone when the last run begins.
    for seeds in ((1, 2), (2, 3)):
        paths = [write_adapter(directory / str(seed), model, modules, seed=seed) for seed in seeds]
        adapters = [runner.load_adapter(path.name, read_adapter(path)) for path in paths]
        chosen = [adapters[0], None, adapters[1], adapters[0], None]
        run = generate_greedily(runner, prompts, 5, config, chosen)
        models = [merged(model, path, scale=2.0) for path in paths]
        expected = [models[0], model, models[1], models[0], model]
        for number, each in enumerate(expected):
            part = GreedyRun([run.outputs[number]], [run.logits[number]])
            check_run(each, [prompts[number]], part)


def test_two_ranks_adapt_the_rows_of_each_adapter(team: Team, tmp_path: Path) -> None:
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    check_adapters("qwen2", modules, team, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("mixtral", ("q_proj", "k_proj", "o_proj")),
    ],
)
def test_two_ranks_adapt_fused_layers_and_the_attention_of_mixtures(
    name: str, modules: tuple[str, ...], team: Team, tmp_path: Path
) -> None:
    check_adapters(name, modules, team, tmp_path)


def test_two_ranks_adapt_quantised_layers_as_one_does(
    team: Team, llama_dir: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "x", make_golden_model("llama untied"), ("q_proj", "down_proj"))
    prompts = make_prompts((9, 20), shared=5)
    config = StepConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    runs = []
    for followers in (NO_FOLLOWERS, team):
        layers = AdaptableLayers()
        runner = make_runner(llama_dir, followers, quantization="int8", adaptable=layers)
        adapters = [runner.load_adapter("x", read_adapter(path)), None] * 2
        runs.append(generate_greedily(runner, prompts, 4, config, adapters))
    assert runs[0].outputs == runs[1].outputs


# The last one: it uses the ranks up.
def test_a_killed_rank_ends_the_engine_and_leaves_no_process(
    team: Team, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_runner(llama_dir, team))
    lost: list[Exception] = []
    is_lost = threading.Event()

    def note(error: Exception) -> None:
        lost.append(error)
        is_lost.set()

    aborted = threading.Event()
    monkeypatch.setattr(ProcessGroup, "abort", lambda group: aborted.set())
    team.watch(note)
    for seq in make_sequences():
        engine.add(seq)
    engine.step()

    (pid,) = team.pids
    assert psutil.Process(pid).environ()["GLOO_SOCKET_IFNAME"] == "lo"
    os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineFailed):
        while engine.has_work:
            engine.step()
    assert is_lost.wait(30)
    # On GPUs nothing else ends the wait for what it was to send.
    assert aborted.wait(30)
    assert "rank 1 ended with status -9" in str(lost[0])
    with pytest.raises(EngineFailed, match="rank"):
        engine.step()
    engine.step_scheduler.check_integrity()
    team.close()
    wait_until(lambda: not psutil.pid_exists(pid), what="the rank is gone")
