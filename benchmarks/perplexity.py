"""Measure perplexity on a text with each quantisation of weights and KV cache, beside transformers.

    python benchmarks/perplexity.py --data wikitext2/test.txt --windows 32 --json figures.json
    python benchmarks/perplexity.py --all --quantization --kv-cache-dtype --json figures.json

The text is cut into windows of as many tokens, one behind the other without overlap, and each is
scored by itself: every token but the first is predicted from those before it in its window.  With
``--all`` they reach to the end of the text.  Ours are the logprobs that a job gets for its prompt.

With ``--json`` figures are kept while they are measured: the same command goes on where it was
stopped, one with more windows or rows adds those.
Exits with 1 if the unquantised model's perplexity differs from transformers' by more than 0.1 %.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Before torch loads its OpenMP runtime: idle threads that spin starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ["HF_HUB_OFFLINE"] = "1"

from perplexity_rows import (
    Record,
    Row,
    RowKey,
    Scorer,
    cut,
    largest_difference,
    make_table,
    score_missing,
)
from perplexity_scores import our_scorer, their_scorer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tidemill.service.config import load_config
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.demo.demo_model import demo_model_dir
from tidemill_gpuworker.engine.model_runner import DTYPES
from tidemill_gpuworker.memory.kv_cache import KV_DTYPES
from tidemill_gpuworker.quantization.on_the_fly import ON_THE_FLY

TEXT = Path(__file__).parents[2] / "shared" / "data" / "wikitext2" / "test.txt"
TOLERANCE = 1e-3
KV_NAMES = ["int8", "fp8_e4m3", "fp8_e5m2"]
THEIRS = RowKey("transformers")
OURS = RowKey("tidemill")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=TEXT, help="a text file (%(default)s)")
    parser.add_argument("--model", type=Path, help="model directory (the demo model)")
    parser.add_argument("--windows", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--all", action="store_true", help="windows up to the end of the text")
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in FILE")
    return parser.parse_args(arguments)


def rows_wanted(options: argparse.Namespace) -> list[RowKey]:
    """Return what is to be measured, the reference and our plain model first."""
    names = [
        *options.quantization,
        *(f"KV cache {name}" for name in options.kv_cache_dtype),
        *(directory.name for directory in options.also),
    ]
    return [THEIRS, OURS, *(RowKey("tidemill", name) for name in names)]


def make_scorer(options: argparse.Namespace, model_dir: Path, key: RowKey) -> tuple[Scorer, int]:
    """Load the model of a row; returns its scorer and the bytes of its weights, 0 if unknown."""
    if key == THEIRS:
        return their_scorer(options, model_dir), 0
    checkpoints = {directory.name: directory for directory in options.also}
    if key.quantisation in checkpoints:
        return our_scorer(options, checkpoints[key.quantisation], None, "auto")
    kv = key.quantisation.removeprefix("KV cache ")
    if kv != key.quantisation:
        return our_scorer(options, model_dir, None, kv)
    return our_scorer(options, model_dir, None if key == OURS else key.quantisation, "auto")


def measure(
    options: argparse.Namespace,
    model_dir: Path,
    row: Row,
    windows: Sequence[list[int]],
    record: Record,
    progress: Progress,
) -> None:
    """Score the windows that the row lacks."""
    task = progress.add_task(f"{row.key.system} {row.key.quantisation}", total=len(windows))
    progress.update(task, completed=min(len(row.sums), len(windows)))
    if len(row.sums) >= len(windows):
        return
    score, row.weight_bytes = make_scorer(options, model_dir, row.key)
    for _ in score_missing(row, windows, score, record):
        progress.advance(task)


def setting_of(options: argparse.Namespace, model_dir: Path, ids: Iterable[int]) -> dict[str, Any]:
    """Return all that figures depend on beside their row."""
    digest = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
    names = ("window_tokens", "dtype", "device")
    chosen = {name: getattr(options, name) for name in names}
    return {"model": str(model_dir), "tokens_digest": digest, **chosen}


def report(console: Console, rows: Sequence[Row], windows: Sequence[list[int]], title: str) -> bool:
    """Print the table and the verdict; returns whether ours and transformers' agree."""
    lengths = list(map(len, windows))
    console.print(make_table(rows, lengths, title))
    error = abs(rows[1].perplexity(lengths) / rows[0].perplexity(lengths) - 1)
    console.print(
        f"ours differs from transformers' by {error:.1e}, {TOLERANCE} is allowed;"
        f" in a single window by {largest_difference(rows[0], rows[1], lengths):.1e} at most"
    )
    return error <= TOLERANCE


def main() -> int:
    options = parse_arguments()
    model_dir = options.model or demo_model_dir(load_config().cache_dir)
    text = options.data.read_text(encoding="utf-8")
    ids = list(Tokenizer.from_directory(model_dir).encode(text))
    windows = cut(ids, None if options.all else options.windows, options.window_tokens)
    record = Record(options.json, setting_of(options, model_dir, ids))
    rows = [record.row(key) for key in rows_wanted(options)]
    with _progress() as progress:
        for row in rows:
            measure(options, model_dir, row, windows, record, progress)
    title = f"{len(windows)} windows of {options.window_tokens} tokens, {options.dtype}"
    return 0 if report(Console(), rows, windows, title) else 1


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
    )


if __name__ == "__main__":
    sys.exit(main())
