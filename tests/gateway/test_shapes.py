"""What models write becomes messages, the same whole and in pieces; without a server."""

import json
from typing import Any

import pytest

from support.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tidemill import Chunk, JobState, Result, Usage
from tidemill.gateway.shaping.chat import ChatEvents, ChatStyle, chat_choices
from tidemill.gateway.shaping.completions import (
    CompletionEvents,
    CompletionStyle,
    completion_choices,
)
from tidemill.gateway.shaping.envelope import Envelope
from tidemill.gateway.shaping.logprobs import CompletionTokens, TokenNames, prompt_logprobs
from tidemill.openai.chat import ChatFormats, ChatJob
from tidemill.openai.token_texts import TokenTexts
from tidemill.openai.tools import CallMode, Tool, ToolChoice
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd

ENVELOPE = Envelope("chatcmpl-1", "chat.completion.chunk", 7, "m", "f")
FORMATS = ChatFormats.of("", tools="hermes", reasoning="qwen3")
TOOLS = ToolChoice(CallMode.AUTO, (Tool("lamp"), Tool("fan")))
TEXT = (
    "<think>Two of them.</think>I switch both."
    '<tool_call>{"name": "lamp", "arguments": {"on": true}}</tool_call>'
    '<tool_call>{"name": "fan", "arguments": {}}</tool_call>'
)


def chat_style(**options: Any) -> ChatStyle:
    return ChatStyle(ChatJob("", (), None, TOOLS, FORMATS), **options)


def result(text: str) -> Result:
    return Result("job", JobState.DONE, text, (1,), "stop", None, Usage())


def events_of(data: bytes) -> list[dict[str, Any]]:
    told = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    return [json.loads(line) for line in told]


def test_reasoning_and_calls_are_parts_of_a_message() -> None:
    [choice] = chat_choices(result(TEXT), chat_style())
    message = choice["message"]
    assert message["content"] == "I switch both."
    assert message["reasoning"] == message["reasoning_content"] == "Two of them."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["lamp", "fan"]
    assert message["tool_calls"][0]["id"] != message["tool_calls"][1]["id"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_a_stream_of_any_pieces_makes_the_same_message(size: int) -> None:
    style = chat_style()
    [whole] = chat_choices(result(TEXT), style)
    maker, data = ChatEvents(ENVELOPE, style, "job"), b""
    for start in range(0, len(TEXT), size):
        data += maker.of_chunk(0, Chunk(start, start + 1, (1,), TEXT[start : start + size], "1-1"))
    data += maker.of_end(0, JobEnd(state="done", finish_reason="stop"))
    parts = [event["choices"][0] for event in events_of(data)]
    deltas = [part["delta"] for part in parts]
    message = whole["message"]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]


def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    style = chat_style(has_reasoning=False)
    [choice] = chat_choices(result(TEXT), style)
    assert "reasoning" not in choice["message"] and choice["message"]["content"]
    maker = ChatEvents(ENVELOPE, style, "job")
    data = maker.of_chunk(0, Chunk(0, 1, (1,), TEXT, "1-1"))
    assert b"Two of them" not in data and b"I switch" in data


def test_calls_that_the_limit_cut_off_leave_the_reason_as_it_is() -> None:
    cut = Result("job", JobState.DONE, TEXT, (1,), "length", None, Usage())
    assert chat_choices(cut, chat_style())[0]["finish_reason"] == "length"


def test_an_event_has_the_same_fields_however_it_is_written() -> None:
    style = CompletionStyle()
    maker = CompletionEvents(ENVELOPE, style)
    chunk = Chunk(0, 1, (1,), 'a "quoted"\nline \u2028 é', "1-1")
    [quick] = events_of(maker.of_chunk(0, chunk))
    slow_maker = CompletionEvents(ENVELOPE, CompletionStyle(tells_usage=True, prompt_ids=[(1,)]))
    [slow] = events_of(slow_maker.of_chunk(0, chunk))
    assert slow.pop("usage")["completion_tokens"] == 1
    assert quick == slow
    assert quick["choices"] == [
        {
            "index": 0,
            "text": chunk.text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
    ]


def test_choices_that_only_score_say_nothing() -> None:
    style = CompletionStyle(has_echo=True, tells_output=False, texts=["ab"])
    [choice] = completion_choices([result("cd")], style)
    assert choice["text"] == "ab"


def test_the_likeliest_of_tokens_with_one_name_is_told() -> None:
    texts = TokenTexts(byte_level_tokenizer())
    # Two bytes that are no character each.
    first, second = [n for n in range(256) if texts.text(n) == "\ufffd"][:2]
    told = TokenLogprobs(logprob=-3.0, rank=2, top=((first, -1.0),))
    tokens = CompletionTokens(TokenNames(texts)).take([second], [told])
    assert tokens["top_logprobs"] == [{"\ufffd": -1.0}]
    by_id = CompletionTokens(TokenNames(texts, as_ids=True)).take([second], [told])
    assert by_id["top_logprobs"] == [{f"token_id:{first}": -1.0, f"token_id:{second}": -3.0}]


def test_prompt_logprobs_are_told_by_token_id() -> None:
    names = TokenNames(TokenTexts(byte_level_tokenizer()))
    told = TokenLogprobs(logprob=-3.0, rank=4, top=((65, -1.0),))
    assert prompt_logprobs([64, 66], [None, told], names) == [
        None,
        {
            "66": {"logprob": -3.0, "rank": 4, "decoded_token": names.name(66)},
            "65": {"logprob": -1.0, "rank": 1, "decoded_token": names.name(65)},
        },
    ]


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_tokenizer()])
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    for text in ("ab abc a  b", "naïve 東京 😀", "a<tool>b", "line\nline\t\x00"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(texts.bytes_of(token_id) for token_id in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)
    assert texts.text(10**6) == ""
