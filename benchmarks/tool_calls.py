"""Our score on the vectors of canitoolcall: raw outputs of models and the calls they stand for.

    python benchmarks/tool_calls.py [--failures]

A vector passes if the whole text and ten seeded ways of cutting it into pieces of 1 to 12
characters all give what it expects; ``soft`` counts those that differ in white space alone.
"""

import argparse
from collections import Counter, defaultdict
from random import Random

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult

from tidemill.openai.deltas import Delta
from tidemill.openai.formats import REASONING_FORMATS, TOOL_FORMATS
from tidemill.openai.output_parser import OutputParser

NUM_CUTS = 10
MOST_CHARS = 12

#: Family -> our names of its formats of tool calls and of reasoning; None is not supported.
FORMATS: dict[str, tuple[str | None, str | None]] = {
    "qwen3-hermes": ("hermes", "qwen3"),
    "qwen3-xml": ("qwen3_coder", "qwen3"),
    "llama": ("llama3_json", None),
    "mistral": ("mistral", "mistral"),
    "deepseek": ("deepseek_v3", "qwen3"),
    "glm": ("glm45", "glm45"),
    "kimi": ("kimi_k2", "kimi_k2"),
    "gemma4": (None, None),
    "gpt-oss": (None, None),
}
#: What models of a family have instead.
VARIANTS = {
    "Llama-4": "llama4_pythonic",
    "DeepSeek-V3.2": "deepseek_v32",
    "DeepSeek-V4": "deepseek_v32",
    "Kimi-K3": None,
}


def make_parser(fixture: Fixture) -> OutputParser | None:
    """Return a parser for the model of a vector, None if its format is not supported."""
    name, thinking = FORMATS[fixture.family]
    for part, variant in VARIANTS.items():
        if part in fixture.models[0]:
            name = variant
    if name is None:
        return None
    if "Magistral-Small-2506" in fixture.models[0]:
        thinking = "think"
    reasoning = None if thinking is None else REASONING_FORMATS[thinking]
    prompt = fixture.generation_prompt or ""
    # Where the prompt is not recorded, it ended with the marker that a thinking model left out.
    if reasoning is not None and fixture.thinking and not prompt:
        prompt = "" if fixture.raw_output.lstrip().startswith(reasoning.open) else reasoning.open
    tools = {
        tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools
    }
    return OutputParser(
        tools,
        tool_format=TOOL_FORMATS[name],
        reasoning=reasoning,
        is_reasoning=reasoning is not None and reasoning.is_open_after(prompt),
    )


def parse(fixture: Fixture, pieces: list[str]) -> ParseResult | None:
    """Return what the pieces of a raw output become together."""
    parser = make_parser(fixture)
    if parser is None:
        return None
    told = Delta()
    for piece in pieces:
        told += parser.feed(piece)
    told += parser.finish()
    return ParseResult(
        told.content or None,
        told.reasoning or None,
        tuple(ParsedToolCall(call.name, call.arguments) for call in told.tool_calls),
    )


def cut(text: str, seed: int) -> list[str]:
    """Return ``text`` in pieces of random lengths; seed 0 gives single characters."""
    random, pieces = Random(seed), []
    while text:
        length = random.randint(1, MOST_CHARS) if seed else 1
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def observe(fixture: Fixture) -> Observation | None:
    """Return the parses of the whole output and of its pieces."""
    whole = parse(fixture, [fixture.raw_output])
    if whole is None:
        return None
    streams = {}
    for seed in range(NUM_CUTS):
        result = parse(fixture, cut(fixture.raw_output, seed))
        assert result is not None
        streams[f"rand:{seed}:{MOST_CHARS}"] = result
    return Observation(nonstream=whole, streams=streams)


def score() -> tuple[dict[str, Counter[str]], list[str]]:
    """Return statuses by family, and a line for each vector that fails."""
    families = load_families()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures = []
    for fixture in load_fixtures():
        observation = observe(fixture)
        if observation is None:
            counts[fixture.family]["unsupported"] += 1
            continue
        rows = run_checks(fixture, families[fixture.family], observation)
        status = case_status(rows).value
        counts[fixture.family][status] += 1
        if status == "fail":
            row = next(row for row in rows if row.status.value == "fail")
            failures.append(f"{fixture.id} {row.check}: {row.detail}")
    return counts, failures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--failures", action="store_true", help="tell which vectors fail")
    options = arguments.parse_args()
    counts, failures = score()
    print("| family | vectors | pass | soft | fail | not supported |")
    print("|---|---|---|---|---|---|")
    total: Counter[str] = Counter()
    for family, count in sorted(counts.items()):
        total += count
        print(_line(family, count))
    print(_line("all", total))
    for failure in failures if options.failures else ():
        print(failure)


def _line(family: str, count: Counter[str]) -> str:
    cells = [count[key] for key in ("pass", "soft_pass", "fail", "unsupported")]
    return f"| {family} | {count.total()} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
