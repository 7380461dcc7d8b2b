"""The questions of GSM8K, the prompts they become, and the number that an answer gives."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path

#: What the model writes when it goes on with a question of its own.
STOP = "\nQuestion:"
_PLACE = "{{question}}"
_FINAL = re.compile(r"[Tt]he answer is[^\d-]*(-?\d[\d,]*(?:\.\d+)?)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """A problem and the number that solves it."""

    text: str
    solution: Decimal


def read_questions(path: Path, count: int) -> list[Question]:
    """Return the first ``count`` questions of a JSON-lines file; raises ValueError if it has fewer.

    The solution is what stands behind ``####``.
    """
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, count)]
    if len(rows) < count:
        raise ValueError(f"{path} has {len(rows)} questions, {count} are wanted")
    return [Question(row["question"], _number(row["answer"].rpartition("####")[2])) for row in rows]


def make_prompts(template: str, questions: Sequence[Question]) -> list[str]:
    """Put each question into the template, whose worked examples come before it."""
    if _PLACE not in template:
        raise ValueError(f"the template has no {_PLACE}")
    return [template.replace(_PLACE, question.text) for question in questions]


def answer_of(text: str) -> Decimal | None:
    """Return the number that a text gives as its answer, else its last one, if there is any."""
    found = _FINAL.search(text)
    if found is not None:
        return _number(found[1])
    numbers = _NUMBER.findall(text)
    return _number(numbers[-1]) if numbers else None


def cut_at_stop(text: str) -> str:
    """Return what comes before the stop string."""
    return text.partition(STOP)[0]


def shared_length(rows: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share, of each all but one at most."""
    first, *others = rows
    shared = len(first) - 1
    for row in others:
        shared = min(shared, len(row) - 1, num_equal(first, row))
    return shared


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many first tokens of two rows are equal."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", ""))
