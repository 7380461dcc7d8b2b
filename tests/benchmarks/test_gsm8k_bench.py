"""The comparison on GSM8K: how answers are read, what counts as equal, and one small run of it."""

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from gsm8k_compare import Divergence, Output, parting, summarise
from gsm8k_questions import (
    Question,
    answer_of,
    cut_at_stop,
    make_prompts,
    read_questions,
    shared_length,
)
from gsm8k_theirs import Record

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gsm8k.py"
QUESTIONS = ROOT / "tests" / "data" / "gsm8k_first64.jsonl"
TEMPLATE = ROOT / "examples" / "gsm8k" / "template.txt"


def test_a_question_is_solved_by_what_stands_behind_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "3 * 4 = 12\n#### 2,125"}))

    assert read_questions(file, 1) == [Question("How many?", Decimal(2125))]
    with pytest.raises(ValueError, match="has 1 questions, 2 are wanted"):
        read_questions(file, 2)


def test_all_prompts_begin_with_the_worked_examples_and_end_for_the_answer() -> None:
    questions = read_questions(QUESTIONS, 3)

    prompts = make_prompts(TEMPLATE.read_text(encoding="utf-8"), questions)

    for question, prompt in zip(questions, prompts, strict=True):
        examples, found, end = prompt.partition(question.text)
        assert examples.count("Question: ") == 6
        assert (found, end) == (question.text, "\nAnswer:")
    with pytest.raises(ValueError, match=r"no \{\{question\}\}"):
        make_prompts("Answer this.", questions)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 16 - 7 = 9 eggs. The answer is 18. The answer is 20.", "18"),
        ("so the answer is $1,250.50 in all, for 3 weeks", "1250.50"),
        ("The answer is about -3 degrees", "-3"),
        ("It takes 2 and 1 bolts, which is 3.", "3"),
        ("nobody knows", None),
    ],
)
def test_an_answer_is_the_number_that_is_called_so_or_else_the_last_one(
    text: str, answer: str | None
) -> None:
    assert answer_of(text) == (None if answer is None else Decimal(answer))


def test_what_follows_the_stop_is_no_part_of_the_answer() -> None:
    assert cut_at_stop(" It is 5.\n\nQuestion: And 6?") == " It is 5.\n"
    assert cut_at_stop(" It is 5.") == " It is 5."


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        ([[1, 2, 3], [1, 2, 4, 5]], 2),
        # Each keeps a token of its own, from which the first logits come.
        ([[1, 2, 3], [1, 2, 3, 4]], 2),
        ([[1, 2], [1, 2]], 1),
        ([[7], [8]], 0),
    ],
)
def test_prompts_share_what_all_of_them_begin_with(rows: list[list[int]], length: int) -> None:
    assert shared_length(rows) == length


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 3], 1),
        ([1, 3], [1], 1),
        ([], [], None),
    ],
)
def test_outputs_part_at_the_first_other_token_or_end(
    ours: list[int], theirs: list[int], place: int | None
) -> None:
    assert parting(ours, theirs) == place


@pytest.mark.parametrize(("gap", "is_tie"), [(9e-5, True), (1.1e-4, False), (None, False)])
def test_only_a_gap_that_rounding_can_close_is_a_near_tie(gap: float | None, is_tie: bool) -> None:
    assert Divergence(3, 17, gap).is_near_tie == is_tie


def test_a_summary_counts_answers_texts_ids_and_solutions_apart() -> None:
    questions = [Question(str(number), Decimal(number)) for number in range(4)]
    theirs = [Output((number, 9), f"It is {number}.") for number in range(4)]
    ours = [
        theirs[0],
        Output((1, 8), "It is 1!"),
        Output((2, 7), "It is 5."),
        Output((3, 6), "It is 3."),
    ]
    divergences = [Divergence(number, 1, 5e-5) for number in (1, 2, 3)]

    summary = summarise(questions, ours, theirs, divergences)

    assert (summary.num_equal_answers, summary.num_equal_texts, summary.num_equal_ids) == (3, 2, 1)
    assert (summary.num_solved, summary.num_solved_by_reference) == (3, 4)
    assert summary.is_exact
    other = summarise(questions, ours, theirs, [*divergences, Divergence(3, 1, 0.1)])
    assert not other.is_exact


def test_a_record_is_gone_on_with_under_the_same_setting_only(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    Record(file, Path("model"), 200).add([1, 2], [3, 4])

    again = Record(file, Path("model"), 200)

    assert again.find([1, 2]) == [3, 4]
    assert again.find([1, 2, 3]) is None
    assert Record(file, Path("model"), 100).find([1, 2]) is None
    assert Record(file, Path("other"), 200).find([1, 2]) is None


@pytest.mark.slow
def test_two_questions_have_the_same_tokens_in_both_systems(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(PROGRAM), "--data", str(QUESTIONS), "--questions", "2"]
    command += ["--max-tokens", "12", "--checked", "1", "--threads", "1", "--json", str(file)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["num_equal_ids"] + len(figures["divergences"]) == 2
    assert 0 < figures["num_tokens"] <= 24
