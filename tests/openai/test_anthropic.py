"""Requests of Anthropic's API as chats."""

from typing import Any

import pytest

from tidemill.openai.anthropic import chat_messages, chat_tool_choice, chat_tools, is_begun
from tidemill.protocol.errors import InvalidRequest

CALL = {"type": "tool_use", "id": "toolu_1", "name": "lamp", "input": {"on": True}}
ANSWER = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "it is on"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_blocks_become_the_messages_of_a_chat_in_their_order() -> None:
    told = chat_messages(
        [text("Be brief."), text("Be kind.")],
        [
            {"role": "user", "content": "Light?"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, text("Sure."), CALL],
            },
            {"role": "user", "content": [ANSWER, text("Thanks."), text("More?")]},
        ],
    )
    assert told == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Light?"},
        {
            "role": "assistant",
            "content": "Sure.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "lamp", "arguments": {"on": True}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "it is on"},
        {"role": "user", "content": "Thanks.\nMore?"},
    ]
    assert not is_begun(told) and not is_begun(told[:3])
    assert is_begun([*told, {"role": "assistant", "content": "Well"}])
    assert not is_begun([*told, {"role": "assistant", "content": " "}])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (None, True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
        (
            {"type": "tool", "name": "lamp"},
            ({"type": "function", "function": {"name": "lamp"}}, True),
        ),
    ],
)
def test_the_choice_of_tools_has_other_names(choice: Any, expected: Any) -> None:
    assert chat_tool_choice(choice) == expected


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages.0"),
        ([{"role": "system", "content": "a"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [text("a"), {"type": "image"}]}], "messages.0.content.1"),
        ([{"role": "user", "content": [CALL]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        (
            [{"role": "assistant", "content": [{**CALL, "input": "x"}]}],
            "messages.0.content.0.input",
        ),
        (
            [{"role": "user", "content": [{**ANSWER, "content": [{"type": "image"}]}]}],
            "messages.0.content.0.content.0",
        ),
    ],
)
def test_what_no_chat_can_have_is_refused_by_its_place(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_messages(None, messages)
    assert refused.value.field == field


def test_tools_that_a_server_would_run_are_refused() -> None:
    assert chat_tools(None) is chat_tools([]) is None
    schema = {"type": "object"}
    [tool] = chat_tools([{"name": "lamp", "input_schema": schema}]) or []
    assert tool["function"] == {"name": "lamp", "description": "", "parameters": schema}
    with pytest.raises(InvalidRequest, match="web_search"):
        chat_tools([{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(InvalidRequest, match="input_schema"):
        chat_tools([{"name": "lamp"}])
