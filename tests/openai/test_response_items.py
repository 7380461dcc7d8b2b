"""Items of responses become the chats that mean the same."""

from typing import Any

import pytest

from tidemill.openai.chat import ChatFormats, ChatJob
from tidemill.openai.formats import reasoning_format, tool_format
from tidemill.openai.response_items import (
    chat_messages,
    chat_tool_choice,
    chat_tools,
    input_items,
    response_format,
    without_oldest,
)
from tidemill.openai.stored_readings import plain_reading, stored_chat_job
from tidemill.openai.tools import parse_tool_choice, parse_tools
from tidemill.protocol.errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": '{"on": true}'}
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}


def messages(given: object, instructions: str | None = None) -> list[dict[str, Any]]:
    return chat_messages(instructions, input_items(given))


def test_a_text_is_one_of_the_user_behind_the_instructions() -> None:
    assert messages("hello", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]


def test_reasoning_text_and_calls_in_a_row_are_one_message_and_their_outputs_follow() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [part("reasoning_text", "Hm.")]}
    said = {"role": "assistant", "content": [part("output_text", "I will.")]}
    other = CALL | {"call_id": "c2"}
    output = {"type": "function_call_output", "call_id": "c2", "output": [part("input_text", "ok")]}
    told = messages([{"role": "user", "content": "on"}, thought, said, CALL, other, output])
    assert told == [
        {"role": "user", "content": "on"},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Hm.",
            "tool_calls": [called("c1"), called("c2")],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
    ]


def test_a_text_behind_a_call_is_a_message_of_its_own() -> None:
    told = messages(
        [CALL, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert [message["content"] for message in told] == ["", "a", "b"]


def test_the_oldest_items_go_up_to_the_next_of_the_user_and_outputs_with_their_calls() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    system, first, second = ({"role": role, "content": ""} for role in ("system", "user", "user"))
    items = input_items([system, first, CALL, output, second, CALL | {"call_id": "c2"}])
    left_out = [without_oldest(items, count) for count in range(7)]
    assert left_out[0] == left_out[1] == items
    assert left_out[2] == left_out[3] == left_out[4] == [items[0], *items[4:]]
    assert left_out[5] == [items[0], items[5]] and left_out[6] == [items[0]]
    late = input_items([CALL, second, output])
    assert without_oldest(late, 1) == [late[1]]


def test_tools_choices_and_forms_have_the_shape_of_chats() -> None:
    [tool] = chat_tools([LAMP | {"strict": True}]) or []
    assert tool["function"] == {"name": "lamp", "parameters": {"type": "object"}, "strict": True}
    named = {"type": "function", "function": {"name": "lamp"}}
    assert chat_tool_choice({"type": "function", "name": "lamp"}) == named
    some = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "lamp"}],
    }
    told = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert chat_tool_choice(some) == told
    assert chat_tool_choice("required") == "required" and chat_tool_choice(None) is None
    form = {"type": "json_schema", "name": "a", "schema": {}, "strict": False}
    named = {"name": "a", "schema": {}, "strict": False}
    assert response_format({"format": form}) == {"type": "json_schema", "json_schema": named}
    assert response_format({"verbosity": "low"}) is None


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ("hello", "input.0"),
        ({"role": "critic", "content": ""}, "input.0.role"),
        ({"role": "user"}, "input.0.content"),
        ({"role": "user", "content": [3]}, "input.0.content.0"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input.0.content.0"),
        ({"role": "user", "content": "\ud800"}, "input.0.content"),
        ({"type": "message", "role": "user", "content": "", "id": 3}, "input.0.id"),
        (CALL | {"arguments": {}}, "input.0.arguments"),
        ({"type": "function_call_output", "output": ""}, "input.0.call_id"),
        ({"type": "computer_call"}, "input.0"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_by_its_place(item: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        input_items([item])
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("tools", "prompt", "text"),
    [
        (True, "", 'Hm.</think> So <tool_call>{"name": "lamp", "arguments": {}}</tool_call>'),
        (True, "<think>\n", "Hm.</think> So it is."),
        (False, "", "<think>Hm.</think> So it is."),
    ],
)
def test_what_is_stored_of_a_chat_reads_its_output_as_the_chat_does(
    tools: bool, prompt: str, text: str
) -> None:
    offered = parse_tools(chat_tools([LAMP]) if tools else None)
    formats = ChatFormats(tool_format("hermes"), reasoning_format("qwen3"))
    job = ChatJob(prompt, (), None, parse_tool_choice(None, offered), formats)
    stored = stored_chat_job(plain_reading(job))
    told = [each.feed(text) + each.finish() for each in (job.parser(), stored.parser())]
    assert told[0] == told[1] and told[0].content.strip().startswith(("So", "Hm"))


def part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


def called(call_id: str) -> dict[str, Any]:
    function = {"name": "lamp", "arguments": '{"on": true}'}
    return {"id": call_id, "type": "function", "function": function}
