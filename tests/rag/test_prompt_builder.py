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
    ("fields", "field"),
    [
        ([], "fields"),
        ([{}], "question"),
        ([{"x": 1}] * 2, "fields"),
        (None, "fields"),
        ("q", "fields"),
        ([None], "fields.0"),
        (["q"], "fields.0"),
        ([{"question": "q", 1: 2}], "fields.0"),
        ([{"question": 10**5000}], "question"),
    ],
)
def test_jobs_that_lack_something_are_refused(fields: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        PromptBuilder(TEMPLATE).build([["a"]], fields)
    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"{field}: ")
    assert "\n" not in refusal.value.one_line()


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"template": None}, "template", "NoneType is not text"),
        ({"template": TEMPLATE.encode()}, "template", "bytes is not text"),
        ({"separator": None}, "separator", "NoneType is not text"),
        ({"separator": 1}, "separator", "int is not text"),
        ({"keep_first": -1}, "keep_first", "-1 is not a number of chunks, at least 0"),
        ({"keep_first": None}, "keep_first", "NoneType is not a number of chunks"),
        ({"keep_first": True}, "keep_first", "bool is not a number of chunks"),
    ],
)
def test_a_builder_refuses_at_once_what_it_could_never_use(
    given: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        PromptBuilder(**{"template": TEMPLATE, **given})
    assert refusal.value.field == field
    assert refusal.value.message == f"{field}: {says}"


@pytest.mark.parametrize(
    ("chunks", "field"),
    [
        (None, "jobs_chunks"),
        ("abc", "jobs_chunks"),
        (["abc"], "jobs_chunks.0"),
        ([None], "jobs_chunks.0"),
        ([["a", 1]], "jobs_chunks.0.1"),
        ([["a", None]], "jobs_chunks.0.1"),
        ([[(1, 2)]], "jobs_chunks.0.0"),
    ],
)
def test_prompts_are_built_of_text_alone(chunks: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        PromptBuilder(TEMPLATE).build(chunks, [{"question": "q"}])
    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"{field}: ")
