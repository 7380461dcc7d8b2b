"""What it costs to keep answers to a form: compiling schemas, and the mask of each token.

    python benchmarks/structured.py [--model DIR] [--schemas FILE] [--tokens N]

Compiles every schema of the JSON-Schema-Test-Suite for the model's vocabulary and, for each one
that is accepted, follows an answer of random allowed tokens.  Prints CPU time, which does not
depend on what else the machine does: of the first compilation with its first mask, and of the mask
and the step of the grammar per token, at p50, p90 and p99.  Refused keywords are counted by name.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler, grammar_compiler
from tidemill_gpuworker.structured_output.grammar_guide import GrammarGuide

MODEL = Path.home() / ".cache/tidemill/models/smollm2-135m-instruct"
SCHEMAS = Path(__file__).parents[1] / "tests/data/json_schemas.jsonl"


@dataclass
class Times:
    """Seconds of everything that was timed."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, default=MODEL)
    arguments.add_argument("--schemas", type=Path, default=SCHEMAS)
    arguments.add_argument("--tokens", type=int, default=100, help="most tokens of an answer")
    options = arguments.parse_args()
    tokenizer = Tokenizer.from_directory(options.model)
    started = time.process_time()
    compiler = grammar_compiler(tokenizer, tokenizer.vocab_size)
    if compiler is None:
        raise SystemExit(f"{options.model}: grammars cannot use this tokenizer")
    print(f"vocabulary of {tokenizer.vocab_size}: {time.process_time() - started:.2f} s")
    times, refused = Times(), Counter[str]()
    schemas = [json.loads(line)["schema"] for line in options.schemas.read_text().splitlines()]
    for number, schema in enumerate(schemas):
        guide = compiled(compiler, schema, times, refused)
        if guide is not None:
            follow(guide, tokenizer, times, Random(number), options.tokens)
    compiler.close()
    report(len(schemas), times, refused)


def compiled(
    compiler: GrammarCompiler, schema: object, times: Times, refused: Counter[str]
) -> GrammarGuide | None:
    """Compile a schema; None if it is refused, which is counted by its reason."""
    structured = StructuredOutput.model_validate({"json_schema": schema})
    started = time.process_time()
    try:
        compilation = compiler.compile(structured)
        compilation.future.exception()
        guide = compilation.guide()
    except InvalidRequest as error:
        refused[_reason(error)] += 1
        return None
    times.compile.append(time.process_time() - started)
    return guide


def follow(
    guide: GrammarGuide, tokenizer: Tokenizer, times: Times, random: Random, most: int
) -> None:
    """Take random allowed tokens until the answer ends."""
    row = torch.empty(-(-tokenizer.vocab_size // 32), dtype=torch.int32)
    for _ in range(most):
        times.mask.append(_timed(lambda: guide.fill_mask(row)))
        if guide.has_ended:
            return
        token = _allowed(row, random)
        if token in tokenizer.eos_token_ids:
            return
        times.accept.append(_timed(lambda token=token: guide.accept(token)))  # type: ignore[misc]


def report(num_schemas: int, times: Times, refused: Counter[str]) -> None:
    """Print what was timed and counted."""
    print(f"{num_schemas} schemas: {len(times.compile)} accepted, {refused.total()} refused")
    print("| CPU time in ms | n | p50 | p90 | p99 | worst |")
    print("|---|---|---|---|---|---|")
    for name, values in vars(times).items():
        print(_row(name, values))
    for reason, count in refused.most_common():
        print(f"{count:4} {reason}")


def _row(name: str, values: Sequence[float]) -> str:
    ordered = sorted(values)
    chosen = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99, 1.0)]
    return f"| {name} | {len(ordered)} | {' | '.join(f'{1000 * v:.3f}' for v in chosen)} |"


def _timed(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _allowed(row: torch.Tensor, random: Random) -> int:
    words = [(index, word) for index, word in enumerate(row.tolist()) if word]
    index, word = random.choice(words)
    bits = [bit for bit in range(32) if word >> bit & 1]
    return 32 * index + random.choice(bits)


def _reason(error: InvalidRequest) -> str:
    what = error.message.removeprefix("structured.json_schema: ")
    if "cannot be enforced" in what:
        return what.removesuffix(" cannot be enforced")
    return "reference to another document" if what.startswith("Resource") else what[:60]


if __name__ == "__main__":
    main()
