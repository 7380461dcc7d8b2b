"""The RAG benchmark in a small size: two workers, prefix order beside FIFO."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny_chat_model import save_tiny_chat_model

pytestmark = pytest.mark.timeout(300)

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "rag_e2e.py"
TOWNS = ["Harlin", "Morvale", "Tessing", "Quorn", "Beldam", "Ostby", "Pelorin", "Wickery"]
GRAINS = ["wheat", "rye", "oats", "barley"]

NUM_PASSAGES, NUM_QUESTIONS, NUM_TEMPLATES = 8, 2, 2
NUM_JOBS = NUM_PASSAGES * NUM_QUESTIONS * NUM_TEMPLATES
MAX_TOKENS = 8


def write_questions(path: Path) -> None:
    """Passages of about 150 tokens with questions, in SQuAD's format."""
    chance = random.Random(5)

    def passage() -> str:
        facts = [
            f"The mill of {town} has {chance.randint(2, 99)} wheels, grinds"
            f" {chance.choice(GRAINS)} and was built in {chance.randint(1100, 1900)}."
            for town in chance.sample(TOWNS, 5)
        ]
        return " ".join(facts)

    def question(number: int) -> str:
        what = ["How many wheels has the mill of", "When was it built in", "What is ground in"]
        return f"{what[number]} {chance.choice(TOWNS)}?"

    paragraphs = [
        {"context": passage(), "qas": [{"question": question(n)} for n in range(NUM_QUESTIONS)]}
        for _ in range(NUM_PASSAGES)
    ]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each byte is a token of it."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tiny_model_dir", 150), id="tiny"),
        pytest.param(
            ("demo_model_dir", 56), id="real", marks=(pytest.mark.model, pytest.mark.slow)
        ),
    ],
)
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("rag")
    write_questions(directory / "questions.json")
    # A cache that holds four passages: in random order most are gone when they are needed again.
    model, num_blocks = request.param
    model_dir = request.getfixturevalue(model)
    options = [
        "--kv-blocks",
        str(num_blocks),
        "--max-tokens",
        str(MAX_TOKENS),
        "--jobs",
        str(NUM_JOBS),
    ]
    files = ["--data", str(directory / "questions.json"), "--json", str(directory / "figures.json")]
    command = [sys.executable, str(PROGRAM), *options, *files, "--model", str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "answers that differ between the runs: 0" in done.stdout
    return json.loads((directory / "figures.json").read_text())


def test_prefix_order_gives_the_tokens_that_fifo_gives(figures: Any) -> None:
    prefix, fifo = figures["runs"]
    assert [prefix["order"], fifo["order"]] == ["prefix", "fifo"]
    assert prefix["answers"] == fifo["answers"]
    assert len(prefix["answers"]) == NUM_JOBS
    assert {len(answer) for answer in prefix["answers"]} == {MAX_TOKENS}
    assert len(set(map(tuple, prefix["answers"]))) > NUM_PASSAGES


def test_prefix_order_computes_each_passage_about_once(figures: Any) -> None:
    prefix, fifo = figures["runs"]
    unique, total = figures["sharing"]["unique_tokens"], figures["sharing"]["total_tokens"]
    assert prefix["prompt_tokens"] == fifo["prompt_tokens"] == total
    assert unique <= prefix["computed_tokens"] < fifo["computed_tokens"]
    # So few jobs begin before all have come, and end with a range that is split: a passage each.
    passage = (total - unique) / (NUM_JOBS - NUM_PASSAGES)
    assert prefix["computed_tokens"] <= unique + 4 * passage
