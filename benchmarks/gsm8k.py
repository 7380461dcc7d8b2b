"""Compare greedy answers to GSM8K, through the whole queue, with transformers in float32.

    python benchmarks/gsm8k.py --questions 200 --record references.jsonl --json figures.json

The first questions of the test split stand behind five worked examples.  Ours are submitted at once
to a Tidemill of one worker, which answers several in a batch and finds the examples in its prefix
cache.  ``generate`` of transformers answers one at a time, and begins with a copy of the KV entries
of the examples; for the first few questions it is checked that it says the same without them.
Both end at an EOS token, a new "Question:" or ``--max-tokens``.  ``--record`` keeps what
transformers said, so that a run that was stopped can be gone on with.

Exits with 1 if token ids differ otherwise than by a near-tie: two logits less than 1e-4 apart.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Before torch loads its OpenMP runtime: idle threads that spin starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ["HF_HUB_OFFLINE"] = "1"

from gsm8k_compare import Divergence, Output, Summary, parting, summarise
from gsm8k_ours import Served, serve
from gsm8k_questions import make_prompts, read_questions
from gsm8k_theirs import Record, Reference, generate_all
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

from tidemill.cli.model import find_model
from tidemill.service.config import load_config

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
TEMPLATE = ROOT / "examples" / "gsm8k" / "template.txt"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=QUESTIONS, help="test.jsonl (%(default)s)")
    parser.add_argument("--template", type=Path, default=TEMPLATE, help="(%(default)s)")
    parser.add_argument("--questions", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="our batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument(
        "--checked", type=int, default=5, help="computed without reuse too (%(default)s)"
    )
    parser.add_argument("--model", help="model directory (the demo model)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of what transformers said")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(arguments)


def check_reuse(reference: Reference, outputs: Sequence[Output], count: int, most: int) -> int:
    """Return for how many first questions transformers says the same without reused KV entries."""
    return sum(
        reference.generate(number, most, reuses_prefix=False) == list(outputs[number].ids)
        for number in range(min(count, len(outputs)))
    )


def find_divergences(
    reference: Reference, ours: Sequence[Output], theirs: Sequence[Output]
) -> list[Divergence]:
    """Return where outputs part, with what transformers' own logits say there."""
    found = []
    for number, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        position = parting(mine.ids, their.ids)
        if position is None:
            continue
        gap = None
        if position < min(len(mine.ids), len(their.ids)):
            gap = reference.gap(number, their.ids[:position], mine.ids[position])
        found.append(Divergence(number, position, gap))
    return found


def make_table(summary: Summary, served: Served, seconds: float) -> Table:
    """Return what is equal, and what each system solved and took."""
    of = f"of {summary.num_questions}"
    table = Table(title=f"GSM8K, five worked examples, {summary.num_questions} questions, float32")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("equal answers", f"{summary.num_equal_answers} {of}")
    table.add_row("equal texts", f"{summary.num_equal_texts} {of}")
    table.add_row("equal token ids", f"{summary.num_equal_ids} {of}")
    ties = sum(divergence.is_near_tie for divergence in summary.divergences)
    table.add_row("near-ties among the others", f"{ties} of {len(summary.divergences)}")
    table.add_row("generated tokens", f"{summary.num_tokens:,}")
    share = served.num_cached_tokens / sum(served.prompt_lengths)
    table.add_row("prompt tokens from our prefix cache", f"{share:.1%}")
    table.add_row("solved by Tidemill", f"{summary.num_solved / summary.num_questions:.1%}")
    solved = summary.num_solved_by_reference / summary.num_questions
    table.add_row("solved by transformers", f"{solved:.1%}")
    table.add_row("Tidemill, seconds", f"{served.seconds:.0f}")
    table.add_row("transformers, seconds", f"{seconds:.0f}")
    return table


def report(out: Console, summary: Summary, num_same: int, num_checked: int) -> bool:
    """Print each difference and the verdict, which is returned."""
    for each in summary.divergences:
        gap = "no tie" if each.gap is None else f"logits {each.gap:.1e} apart"
        out.print(f"question {each.question} parts at token {each.position}: {gap}")
    out.print(f"transformers without reused KV entries: {num_same} of {num_checked} equal")
    is_right = summary.is_exact and num_same == num_checked
    out.print("all token ids are equal but for near-ties" if is_right else "NOT EXACT")
    return is_right


def main() -> int:
    options = parse_arguments()
    model_dir, _ = find_model(options.model, load_config().cache_dir)
    questions = read_questions(options.data, options.questions)
    prompts = make_prompts(options.template.read_text(encoding="utf-8"), questions)
    with _progress(Console(stderr=True, highlight=False)) as progress:
        reference = Reference(model_dir, prompts, options.threads)
        record = Record(options.record, model_dir, options.max_tokens)
        theirs, seconds = generate_all(reference, record, options.max_tokens, progress)
        num_checked = min(options.checked, len(theirs))
        num_same = check_reuse(reference, theirs, num_checked, options.max_tokens)
        served = serve_all(options, prompts, model_dir, progress)
    assert served.prompt_lengths == tuple(map(len, reference.prompts)), "prompts differ"
    divergences = find_divergences(reference, served.outputs, theirs)
    summary = summarise(questions, served.outputs, theirs, divergences)
    out = Console()
    out.print(make_table(summary, served, seconds))
    is_right = report(out, summary, num_same, num_checked)
    if options.json is not None:
        figures = {"seconds": served.seconds, "reference_seconds": seconds, **asdict(summary)}
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if is_right else 1


def serve_all(
    options: argparse.Namespace, prompts: Sequence[str], model_dir: Path, progress: Progress
) -> Served:
    """Answer all prompts with a Tidemill in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="tm-gsm8k-") as home:
        return serve(
            prompts,
            model_dir,
            Path(home),
            progress,
            max_tokens=options.max_tokens,
            num_seqs=options.max_num_seqs,
            num_threads=options.threads,
        )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


if __name__ == "__main__":
    sys.exit(main())
