"""The jobs of the RAG benchmark: XQuAD's passages and questions, each asked in two ways."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.rag import PromptBuilder

#: Both begin alike, so that all questions on a passage share it.
TEMPLATES = (
    "Answer from the passage.\n\n{{chunks}}\n\nQuestion: {{question}}",
    "Answer from the passage.\n\n{{chunks}}\n\nIn a few words: {{question}}",
)


@dataclass(frozen=True)
class Question:
    """One question and the passage that holds its answer."""

    passage: str
    text: str


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file in SQuAD's format, those on one passage together."""
    articles = json.loads(path.read_text("utf-8"))["data"]
    return [
        Question(paragraph["context"], question["question"])
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def make_texts(questions: Sequence[Question], num_jobs: int, seed: int) -> list[str]:
    """Return the first ``num_jobs`` texts of users, in an order that follows from the seed.

    Exits if there are not so many.
    """
    most = len(questions) * len(TEMPLATES)
    if not 1 <= num_jobs <= most:
        raise SystemExit(f"--jobs {num_jobs} is not between 1 and {most}, which the file gives")
    chosen = questions[: -(-num_jobs // len(TEMPLATES))]
    passages = [[question.passage] for question in chosen]
    fields = [{"question": question.text} for question in chosen]
    built = [PromptBuilder(template).build(passages, fields) for template in TEMPLATES]
    texts = [text for pair in zip(*built, strict=True) for text in pair][:num_jobs]
    random.Random(seed).shuffle(texts)
    return texts
