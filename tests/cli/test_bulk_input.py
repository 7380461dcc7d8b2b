"""Lines of a bulk input file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.bulk_input import InputLine, LineReader, count_lines
from tidemill.protocol.errors import ConfigError


def read(tmp_path: Path, *rows: Any, **options: Any) -> list[InputLine]:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    settings = {"template": None, "id_field": None, "model": None, "defaults": {}, **options}
    return list(LineReader(**settings).read(path))


def test_a_plain_line_is_a_prompt_with_sampling_fields(tmp_path: Path) -> None:
    [line] = read(tmp_path, {"id": 7, "prompt": "hi", "max_tokens": 3, "note": "kept out"})
    assert line.spec is not None
    assert (line.custom_id, line.spec.prompt) == ("7", "hi")
    assert line.spec.options["max_tokens"] == 3
    assert "note" not in line.spec.options


def test_a_line_of_the_batch_format_is_understood(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 5}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    [line] = read(tmp_path, row)
    assert line.spec is not None
    assert (line.custom_id, line.spec.prompt) == ("a", messages)
    assert (line.spec.options["model"], line.spec.options["max_tokens"]) == ("m", 5)


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True}, 0),
        ({"logprobs": 3}, 3),
        ({"logprobs": False, "top_logprobs": 5}, None),
    ],
)
def test_logprobs_are_asked_for_as_in_chats_and_as_in_completions(
    tmp_path: Path, body: dict[str, Any], logprobs: int | None
) -> None:
    row = {"prompt": "hi", "logit_bias": {"7": 1}, "presence_penalty": 0.5, **body}
    [line] = read(tmp_path, row)
    assert line.spec is not None
    assert line.spec.options.get("logprobs") == logprobs
    assert line.spec.options["logit_bias"] == {"7": 1}
    assert line.spec.options["presence_penalty"] == 0.5


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"structured": {"regex": "a"}}, {"regex": "a"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_a_line_says_what_its_answer_must_look_like(
    tmp_path: Path, fields: dict[str, Any], structured: dict[str, Any] | None
) -> None:
    [line] = read(tmp_path, {"prompt": "hi", **fields})
    assert line.spec is not None
    assert line.spec.options.get("structured") == structured


def test_tools_of_a_line_are_refused_by_name(tmp_path: Path) -> None:
    body = {"prompt": "hi", "tools": [{"type": "function", "function": {"name": "f"}}]}
    [line] = read(tmp_path, {"custom_id": "a", "body": body})
    assert line.spec is None
    assert (line.error or "").startswith("tools: the jobs of a file cannot call tools")


def test_a_line_with_a_form_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    [line] = read(tmp_path, {"prompt": "hi", "response_format": {"type": "xml"}})
    assert line.spec is None
    assert "response_format.type" in (line.error or "")


def test_a_template_makes_a_prompt_of_any_fields(tmp_path: Path) -> None:
    [line] = read(tmp_path, {"q": "2+2 {{x}}"}, template="Q: {{ q }}\nA:")
    assert line.spec is not None and line.spec.prompt == "Q: 2+2 {{x}}\nA:"


def test_a_lines_own_fields_go_before_the_defaults(tmp_path: Path) -> None:
    defaults = {"temperature": 0.0, "max_tokens": 9}
    [line] = read(tmp_path, {"prompt": "hi", "temperature": 1.0}, defaults=defaults)
    assert line.spec is not None
    assert (line.spec.options["temperature"], line.spec.options["max_tokens"]) == (1.0, 9)


def test_a_line_may_name_its_prefix(tmp_path: Path) -> None:
    rows = [{"prompt": "hi"}, {"prompt": "hi", "prefix_id": "own"}]
    lines = read(tmp_path, *rows, defaults={"prefix_id": "common", "deadline": 5.0})
    specs = [line.spec for line in lines if line.spec is not None]
    assert [spec.options["prefix_id"] for spec in specs] == ["common", "own"]
    assert [spec.options["deadline"] for spec in specs] == [5.0, 5.0]
    assert len({spec.options["idempotency_key"] for spec in specs}) == 2


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{not json", "line"),
        ("[1]", "line"),
        ({"question": "?"}, "prompt"),
        ({"body": 3}, "body"),
        ('{"prompt": "' + "x" * (5 << 20) + '"}', "line"),
        ("[" * 100_000, "line"),
    ],
)
def test_a_bad_line_is_reported_and_the_next_one_read(tmp_path: Path, row: Any, named: str) -> None:
    bad, good = read(tmp_path, row, {"prompt": "hi"})
    assert bad.spec is None and (bad.error or "").startswith(f"{named}: ")
    assert good.spec is not None and good.number == 2


def test_a_template_field_that_a_line_lacks_is_named(tmp_path: Path) -> None:
    [line] = read(tmp_path, {"a": 1}, template="{{b}}")
    assert (line.error or "").startswith("b: ")


def test_equal_lines_get_jobs_of_their_own_and_a_second_reading_the_same_jobs(
    tmp_path: Path,
) -> None:
    rows = [{"custom_id": "x", "prompt": "hi"}] * 2
    keys = [line.spec.options["idempotency_key"] for line in read(tmp_path, *rows) if line.spec]
    again = [line.spec.options["idempotency_key"] for line in read(tmp_path, *rows) if line.spec]
    assert keys == again and len(set(keys)) == 2


def test_a_lone_surrogate_is_passed_on_for_the_job_to_be_refused(tmp_path: Path) -> None:
    [line] = read(tmp_path, '{"prompt": "a\\ud800b"}')
    assert line.spec is not None and line.spec.prompt == "a\ud800b"


def test_empty_lines_are_no_jobs(tmp_path: Path) -> None:
    lines = read(tmp_path, {"prompt": "a"}, "", "   ", {"prompt": "b"})
    assert [line.number for line in lines] == [1, 4]
    assert count_lines(tmp_path / "in.jsonl") == 2


def test_a_missing_input_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jsonl"):
        count_lines(tmp_path / "nothing.jsonl")
