"""Prompts from a template, chunks and questions."""

from typing import Any

import pytest

from tidemill import InvalidRequest
from tidemill.rag import PromptBuilder, expected_savings

TEMPLATE = "Answer from the passages.\n\n{{chunks}}\n\nQuestion: {{ question }}\nAnswer:"


def test_chunks_stand_in_canonical_order_and_fields_are_filled_in() -> None:
    chunks = [["tides", "moon"], ["moon", "sun"]]
    fields = [{"question": "Why?"}, {"question": "When?"}]
    first, second = PromptBuilder(TEMPLATE, separator=" / ").build(chunks, fields)
    head = "Answer from the passages.\n\nmoon / "
    assert first == head + "tides\n\nQuestion: Why?\nAnswer:"
    assert second == head + "sun\n\nQuestion: When?\nAnswer:"


def test_the_most_relevant_chunk_may_stay_first() -> None:
    chunks = [["tides", "moon", "sea"], ["moon", "sea"]]
    fields = [{"question": "Why?"}, {"question": "When?"}]
    first, _ = PromptBuilder(TEMPLATE, keep_first=1).build(chunks, fields)
    assert first.startswith("Answer from the passages.\n\ntides\n\n")


def test_built_prompts_share_what_the_retrieved_order_hides() -> None:
    chunks = [["a" * 50, "b" * 50], ["b" * 50, "a" * 50]]
    fields = [{"question": "one"}, {"question": "two"}]
    shared = expected_savings(PromptBuilder(TEMPLATE).build(chunks, fields)).shared_tokens
    assert shared > 100


def test_what_a_chunk_holds_is_no_template() -> None:
    builder = PromptBuilder("{{chunks}} {{question}}")
    assert builder.build([["{{question}} \\1"]], [{"question": "q"}]) == ["{{question}} \\1 q"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{question}}", "it has 0 places"),
        ("{{chunks}} {{chunks}}", "it has 2 places"),
        ("{{question}} {{chunks}}", "{{question}} stands before {{chunks}}"),
    ],
)
def test_a_template_under_which_nothing_is_shared_is_refused(template: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        PromptBuilder(template)
    assert refusal.value.field == "template"
    assert says in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "field"), [([], "fields"), ([{}], "question"), ([{"x": 1}] * 2, "fields")]
)
def test_jobs_that_lack_something_are_refused(fields: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        PromptBuilder(TEMPLATE).build([["a"]], fields)
    assert refusal.value.field == field
