"""Measure perplexity on a text with each quantisation of weights and KV cache, beside transformers.

    python benchmarks/perplexity.py --data wikitext2/test.txt --windows 16

The text is cut into windows of as many tokens, each scored by itself: every token but the first is
predicted from those before it in the window. Ours are the logprobs that a job gets for its prompt.
Exits with 1 if the unquantised model's perplexity differs from transformers' by more than 0.1 %.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from tidemill.protocol.sampling import SamplingParams
from tidemill.service.config import load_config
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.demo.demo_model import demo_model_dir
from tidemill_gpuworker.engine.model_runner import DTYPES, ModelRunner
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.kv_cache import KV_DTYPES
from tidemill_gpuworker.quantization.on_the_fly import ON_THE_FLY
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

PLAIN = "none"
TOLERANCE = 1e-3
KV_NAMES = ["int8", "fp8_e4m3", "fp8_e5m2"]
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Figure:
    """One measurement; ``weight_bytes`` is 0 where it is not known."""

    system: str
    quantisation: str
    perplexity: float
    weight_bytes: int
    cpu_seconds: float


def parse_arguments(arguments: Several[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--model", type=Path, help="model directory (the demo model)")
    parser.add_argument("--windows", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--window-tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument(
        "--quantization", nargs="*", choices=ON_THE_FLY, default=list(ON_THE_FLY), help="(all)"
    )
    parser.add_argument(
        "--kv-cache-dtype", nargs="*", choices=KV_DTYPES, default=KV_NAMES, help="(%(default)s)"
    )
    parser.add_argument(
        "--also", nargs="*", type=Path, default=[], metavar="DIR", help="quantised checkpoints"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(arguments)


def cut(ids: list[int], num_windows: int, size: int) -> list[list[int]]:
    """Return the first windows that are full; raises ValueError if there is none."""
    windows = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if not windows or size < 2:
        raise ValueError(f"the text has {len(ids)} tokens, too few for a window of {size}")
    return windows[:num_windows]


def score_ours(runner: ModelRunner, window: list[int]) -> float:
    """Return the summed negative logprobs of all tokens but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    seq = Sequence("window", window, params, seed=0)
    seq.block_table = list(range(-(-len(window) // _BLOCK_SIZE)))
    runner.execute(StepPlan((ScheduledSequence(seq, 0, len(window)),)))
    found = [item.logprob for item in seq.prompt_logprobs if item is not None]
    assert len(found) == len(window) - 1
    return -math.fsum(found)


@torch.inference_mode()
def score_theirs(model: transformers.PreTrainedModel, window: list[int]) -> float:
    """Return the same of transformers."""
    ids = torch.tensor([window], device=model.device)
    logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return -float(logprobs.gather(1, ids[0, 1:, None]).double().sum())


def perplexity(total: float, windows: list[list[int]]) -> float:
    """Return e to the mean over all predicted tokens."""
    return math.exp(total / sum(len(window) - 1 for window in windows))


def measure_ours(
    options: argparse.Namespace,
    model_dir: Path,
    windows: list[list[int]],
    method: str | None,
    kv: str,
) -> Figure:
    runner = ModelRunner(
        model_dir,
        device=options.device,
        dtype=options.dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=-(-options.window_tokens // _BLOCK_SIZE),
        num_threads=options.threads,
        quantization=method,
        kv_cache_dtype=kv,
    )
    start = time.process_time()
    total = math.fsum(score_ours(runner, window) for window in windows)
    seconds = time.process_time() - start
    weights = runner.memory_use().weights
    name = method or PLAIN if model_dir not in options.also else model_dir.name
    if kv != "auto":
        name = f"KV cache {kv}"
    return Figure("tidemill", name, perplexity(total, windows), weights, seconds)


def measure_theirs(
    options: argparse.Namespace, model_dir: Path, windows: list[list[int]]
) -> Figure:
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=DTYPES[options.dtype]
    )
    model = model.to(options.device).eval()
    start = time.process_time()
    total = math.fsum(score_theirs(model, window) for window in windows)
    seconds = time.process_time() - start
    return Figure("transformers", PLAIN, perplexity(total, windows), 0, seconds)


def measure_all(
    options: argparse.Namespace, model_dir: Path, windows: list[list[int]], console: Console
) -> list[Figure]:
    figures = [measure_theirs(options, model_dir, windows)]
    console.print(figures[-1])
    runs: list[tuple[Path, str | None, str]] = [(model_dir, None, "auto")]
    runs += [(model_dir, method, "auto") for method in options.quantization]
    runs += [(model_dir, None, name) for name in options.kv_cache_dtype]
    runs += [(directory, None, "auto") for directory in options.also]
    for directory, method, kv in runs:
        figures.append(measure_ours(options, directory, windows, method, kv))
        console.print(figures[-1], style="dim")
    return figures


def make_table(figures: list[Figure], title: str) -> Table:
    table = Table(title=title)
    for column in ("system", "quantisation"):
        table.add_column(column)
    for column in ("perplexity", "change", "weights MiB", "CPU s"):
        table.add_column(column, justify="right")
    reference = figures[0].perplexity
    for figure in figures:
        change = f"{100 * (figure.perplexity / reference - 1):+.3f} %"
        size = f"{figure.weight_bytes / 2**20:.1f}" if figure.weight_bytes else "-"
        table.add_row(
            *(figure.system, figure.quantisation, f"{figure.perplexity:.4f}", change, size),
            f"{figure.cpu_seconds:.1f}",
        )
    return table


def main() -> int:
    options = parse_arguments()
    console = Console()
    model_dir = options.model or demo_model_dir(load_config().cache_dir)
    ids = Tokenizer.from_directory(model_dir).encode(options.data.read_text(encoding="utf-8"))
    windows = cut(list(ids), options.windows, options.window_tokens)
    figures = measure_all(options, model_dir, windows, console)
    title = f"{len(windows)} windows of {options.window_tokens} tokens, {options.dtype}"
    console.print(make_table(figures, title))
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
    error = abs(figures[1].perplexity / figures[0].perplexity - 1)
    console.print(f"ours differs from transformers' by {error:.1e}, {TOLERANCE} is allowed")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
