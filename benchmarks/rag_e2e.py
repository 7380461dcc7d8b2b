"""Measure what prefix order saves end to end: questions on passages, in random order, on CPUs.

    python benchmarks/rag_e2e.py --jobs 2000 --json figures.json

Two questions in other words are made of each question of XQuAD, shuffled, and submitted at once as
batch work to a Tidemill of two CPU workers with the small demo model in float32; once for each
order of the scheduler.  Every run starts its own broker, scheduler and workers.

How to read the table
  computed    prompt tokens that the workers computed: those that no prefix cache held.
  unique      what must be computed even if nothing is ever computed twice: the distinct full
              blocks of 16 tokens, and of each job the rest, which is at least its last token.
  ratio       computed over unique; the target is 1.02 with prefix order.
  seconds     from the first submission to the end of the last job.
All runs must give the same tokens; otherwise the program says so and exits with status 1.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rag_jobs import make_texts, read_questions
from rag_run import Run, Setup, run_jobs
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tidemill import ChatMessage
from tidemill.cli.model import find_model
from tidemill.rag import Savings, expected_savings
from tidemill.service.config import load_config
from tidemill.service.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT.parent / "shared" / "data" / "xquad" / "xquad.en.json"
TARGET_RATIO = 1.02

#: Order -> what the scheduler process is told.
ORDERS = {"prefix": (), "fifo": ("--policy", "fifo")}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=QUESTIONS, help="questions in SQuAD's format (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=2000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (%(default)s)")
    parser.add_argument(
        "--order", nargs="+", choices=list(ORDERS), default=list(ORDERS), help="which runs"
    )
    parser.add_argument("--workers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="of each worker (cores / workers)")
    parser.add_argument(
        "--kv-blocks", type=int, default=512, help="KV cache of a worker (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=8, help="of each answer, exactly (%(default)s)"
    )
    parser.add_argument("--model", help="model directory (the demo model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(arguments)


def as_conversation(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a user's text, ready for the answer."""
    prompt = tokenizer.apply_chat_template([ChatMessage(role="user", content=text)])
    return tokenizer.encode(prompt, add_special_tokens=False)


def make_table(runs: Sequence[Run], savings: Savings) -> Table:
    """Return the figures of all runs, one a line."""
    table = Table()
    for title in ("order", "seconds", "prompt tokens", "computed", "unique", "ratio", "hit rate"):
        table.add_column(title, justify="left" if title == "order" else "right")
    for run in runs:
        table.add_row(
            run.order,
            f"{run.seconds:.1f}",
            f"{run.prompt_tokens:,}",
            f"{run.computed_tokens:,}",
            f"{savings.unique_tokens:,}",
            f"{run.computed_tokens / savings.unique_tokens:.4f}",
            f"{run.hit_rate:.1%} of {savings.bound:.1%}",
        )
    return table


def report(out: Console, runs: Sequence[Run], savings: Savings) -> bool:
    """Print the table and the verdicts; returns whether all runs gave the same tokens."""
    out.print(make_table(runs, savings))
    by_order = {run.order: run for run in runs}
    prefix, fifo = by_order.get("prefix"), by_order.get("fifo")
    if prefix is not None:
        ratio = prefix.computed_tokens / savings.unique_tokens
        word = "met" if ratio <= TARGET_RATIO else "MISSED"
        out.print(f"computed / unique {ratio:.4f}, target {TARGET_RATIO}: {word}")
    if prefix is not None and fifo is not None:
        out.print(f"prefix order takes {prefix.seconds / fifo.seconds:.2f} of the time of FIFO")
    differing = {
        index
        for run in runs[1:]
        for index, pair in enumerate(zip(runs[0].answers, run.answers, strict=True))
        if pair[0] != pair[1]
    }
    if len(runs) > 1:
        out.print(f"answers that differ between the runs: {len(differing)}")
    return not differing


def main() -> None:
    options = parse_arguments()
    config = load_config()
    model_dir, _ = find_model(options.model, config.cache_dir)
    tokenizer = Tokenizer.from_directory(model_dir)
    texts = make_texts(read_questions(options.data), options.jobs, options.seed)
    prompts = [as_conversation(text, tokenizer) for text in texts]
    savings = expected_savings(prompts)
    console = Console(stderr=True, highlight=False)
    console.print(str(savings))
    setup = Setup(
        model_dir, options.workers, options.threads, options.kv_blocks, options.max_tokens
    )
    runs = []
    with _progress(console) as progress, tempfile.TemporaryDirectory(prefix="tm-rag-") as home:
        for order in options.order:
            directory = Path(home) / order
            runs.append(run_jobs(prompts, setup, order, ORDERS[order], directory, progress))
    is_same = report(Console(highlight=False), runs, savings)
    if options.json is not None:
        options.json.write_text(json.dumps(_figures(options, runs, savings), indent=2))
    if not is_same:
        raise SystemExit(1)


def _figures(
    options: argparse.Namespace, runs: Sequence[Run], savings: Savings
) -> dict[str, object]:
    return {
        "settings": {key: str(value) for key, value in vars(options).items()},
        "conditions": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "sharing": asdict(savings) | {"unique_tokens": savings.unique_tokens},
        "runs": [asdict(run) for run in runs],
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )


if __name__ == "__main__":
    main()
