"""Print how much more continuous batching over paged memory does than static batching.

    python benchmarks/static_batching.py --workload chat --requests 128 --dtype float32
    python benchmarks/static_batching.py --steps-only

Both serve the same requests with the same model and the same KV memory. Static batching reserves
the longest sequence's room for each request, fills a batch with as many as that allows, and begins
the next one when its last request has ended; requests that end earlier leave the batch, so that it
costs less than a padded one would. Systems take turns in one process each; medians of the repeats
are shown. With --steps-only nothing is computed: it tells in seconds how many steps each takes,
which is the ratio of tokens per second where a step costs the same for few requests and for many.

Workloads: W3, with memory for 8,192 tokens and 1,024 at most each; chat, lognormal prompts of 161
and outputs of 338 tokens in the mean, what the vLLM paper tells of ShareGPT, with memory for 16,384
tokens, what it tells of a model of 13B parameters on a GPU of 40 GB, and 4,096 at most each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path

# Before torch loads its OpenMP runtime: idle threads that spin starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from overheads_bookkeeping import bookkeeping_engine
from rich.console import Console
from rich.table import Table
from workloads import TITLES, Request, make_workload

from tidemill.protocol.sampling import SamplingParams
from tidemill.service.config import load_config
from tidemill_gpuworker.demo.demo_model import demo_model_dir
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.steps.step_config import SchedulingMode, StepConfig

MODES: tuple[SchedulingMode, ...] = ("static", "continuous")
BLOCK_SIZE = 16
_CPU_STEP_TOKENS = 512


@dataclass(frozen=True)
class Workload:
    """Requests, and the memory that they are served in unless the command line says otherwise."""

    title: str
    num_requests: int
    kv_tokens: int
    max_model_len: int


WORKLOADS = {
    "W3": Workload(TITLES["W3"], 64, 8192, 1024),
    "chat": Workload("lengths as in chats, 161 in and 338 out in the mean", 128, 16384, 4096),
}


@dataclass(frozen=True)
class Run:
    """What one mode did: times in seconds; ``used_share`` is the mean share of the KV cache's slots
    that held a token, ``mean_batch`` the mean number of requests in a step."""

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_output_tokens: int
    first_token_p50: float
    mean_batch: float
    used_share: float


def parse_arguments(arguments: Many[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model directory (the demo model)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, default="chat", help="(%(default)s)")
    parser.add_argument("--kv-tokens", type=int, help="KV memory (the workload's)")
    parser.add_argument("--max-model-len", type=int, help="(the workload's)")
    parser.add_argument("--requests", type=int, help="only so many of the workload")
    parser.add_argument("--steps-only", action="store_true", help="count steps, without a model")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, help="run one here and print JSON")
    options = parser.parse_args(arguments)
    workload = WORKLOADS[options.workload]
    options.kv_tokens = options.kv_tokens or workload.kv_tokens
    options.max_model_len = options.max_model_len or workload.max_model_len
    options.requests = options.requests or workload.num_requests
    return options


def draw_requests(options: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Return the requests of the workload."""
    if options.workload == "W3":
        return make_workload("W3", vocab_size, options.seed)[: options.requests]
    return _chats(options.requests, options.max_model_len, vocab_size, options.seed)


def _chats(number: int, max_model_len: int, vocab_size: int, seed: int) -> list[Request]:
    generator = np.random.default_rng(seed)
    prompts = _lengths(generator, 161, number, max_model_len // 2)
    outputs = _lengths(generator, 338, number, max_model_len // 2)
    return [
        Request(generator.integers(1000, vocab_size, prompt).tolist(), output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _lengths(generator: np.random.Generator, mean: int, number: int, longest: int) -> list[int]:
    """Lognormal with a deviation of 1 in the logarithm; the few that are longer are cut."""
    drawn = generator.lognormal(np.log(mean) - 0.5, 1.0, number)
    return [int(length) for length in np.clip(drawn, 4, longest)]


def measure(options: argparse.Namespace, mode: SchedulingMode) -> Run:
    """Serve the workload in one mode."""
    engine, vocab_size = _engine(options, mode)
    requests = draw_requests(options, vocab_size)
    for index, request in enumerate(requests):
        engine.add(_sequence(index, request))
    return _serve(engine, sum(request.num_output for request in requests))


def _engine(options: argparse.Namespace, mode: SchedulingMode) -> tuple[Engine, int]:
    if options.steps_only:
        num_blocks = options.kv_tokens // BLOCK_SIZE
        config = StepConfig(
            max_model_len=options.max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=_CPU_STEP_TOKENS,
            scheduling_mode=mode,
        )
        return bookkeeping_engine(config, num_blocks, BLOCK_SIZE), 50_000
    # Imported here: the process that only collects needs no torch.
    from tidemill_gpuworker.loading.model_setup import load_model

    served = load_model(_worker_config(options, mode))
    assert isinstance(served.engine, Engine), "the model generates"
    return served.engine, served.card.vocab_size


def _serve(engine: Engine, num_output_tokens: int) -> Run:
    first: dict[str, float] = {}
    batches, used = [], []
    started, cpu_started = time.perf_counter(), time.process_time()
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            first.setdefault(output.seq.seq_id, time.perf_counter() - started)
        batches.append(len(outputs))
        use = engine.step_scheduler.kv_use
        used.append(use.num_tokens / (use.num_blocks * use.block_size))
    return Run(
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        num_steps=len(batches),
        num_output_tokens=num_output_tokens,
        first_token_p50=statistics.median(first.values()),
        mean_batch=statistics.mean(batches),
        used_share=statistics.mean(used),
    )


def _worker_config(options: argparse.Namespace, mode: SchedulingMode) -> WorkerConfig:
    return WorkerConfig(
        model_dir=options.model or demo_model_dir(load_config().cache_dir),
        served_model_name="benchmark",
        redis_url="",
        service=load_config(),
        device=options.device,
        dtype=options.dtype,
        num_threads=options.threads,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=options.kv_tokens // BLOCK_SIZE,
        max_model_len=options.max_model_len,
        scheduling_mode=mode,
        swap_space=0.0,
    )


def _sequence(index: int, request: Request) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
    return Sequence(str(index), request.prompt, params, seed=0)


def measure_apart(options: argparse.Namespace, mode: SchedulingMode) -> Run:
    """Run one measurement in a process of its own, unless there is nothing to compute."""
    if options.steps_only:
        return measure(options, mode)
    command = [sys.executable, __file__, "--mode", mode]
    for name in (
        "device",
        "dtype",
        "threads",
        "workload",
        "kv_tokens",
        "max_model_len",
        "requests",
    ):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--seed", str(options.seed)]
    if options.model is not None:
        command += ["--model", str(options.model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def make_table(runs: dict[SchedulingMode, list[Run]], options: argparse.Namespace) -> Table:
    """Return the medians, one row a mode."""
    table = Table(
        title=f"{options.requests} requests, {WORKLOADS[options.workload].title};"
        f" KV memory for {options.kv_tokens:,} tokens, {options.max_model_len:,} at most each",
        title_justify="left",
    )
    table.add_column("mode")
    for name in ("output tok/s", "per CPU s", "TTFT p50 s", "steps", "batch", "KV used"):
        table.add_column(name, justify="right")
    for mode, cell in runs.items():
        first = f"{statistics.median(run.first_token_p50 for run in cell):.1f}"
        computed = (f"{rate(cell):,.0f}", f"{cpu_rate(cell):,.0f}", first)
        table.add_row(
            mode,
            *(("-",) * 3 if options.steps_only else computed),
            f"{cell[0].num_steps:,}",
            f"{cell[0].mean_batch:.1f}",
            f"{cell[0].used_share:.0%}",
        )
    return table


def rate(cell: list[Run]) -> float:
    """Return the median of output tokens per second."""
    return statistics.median(run.num_output_tokens / run.seconds for run in cell)


def cpu_rate(cell: list[Run]) -> float:
    """Return the median of output tokens per CPU second."""
    return statistics.median(run.num_output_tokens / run.cpu_seconds for run in cell)


def main() -> None:
    options = parse_arguments()
    if options.mode is not None:
        print(json.dumps(asdict(measure(options, options.mode))))
        return
    runs: dict[SchedulingMode, list[Run]] = {}
    for _ in range(options.repeat):
        for mode in MODES:
            runs.setdefault(mode, []).append(measure_apart(options, mode))
    console = Console()
    console.print(make_table(runs, options))
    static, continuous = runs["static"], runs["continuous"]
    if options.steps_only:
        fewer = static[0].num_steps / continuous[0].num_steps
        console.print(f"continuous / static: {fewer:.2f} times fewer steps")
        return
    console.print(
        f"continuous / static: {rate(continuous) / rate(static):.2f} times the output tokens per"
        f" second, {cpu_rate(continuous) / cpu_rate(static):.2f} times per CPU second,"
        f" {static[0].num_steps / continuous[0].num_steps:.2f} times fewer steps"
    )


if __name__ == "__main__":
    main()
