"""Events of responses, made of what jobs produced, without a gateway."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tidemill._follow import Chunk
from tidemill.gateway.errors import STOPPING
from tidemill.gateway.shaping.response_events import ResponseEvents
from tidemill.gateway.shaping.responses import ResponseHead
from tidemill.openai.chat import ChatFormats, ChatJob
from tidemill.openai.formats import reasoning_format, tool_format
from tidemill.openai.tools import CallMode, Tool, ToolChoice
from tidemill.protocol.messages import JobEnd

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FIELDS: dict[str, Any] = {
    "background": False,
    "created_at": 1,
    "model": "m",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
PIECES = ["<think>", "Hm", "m.", "</think>", " So", ", ", '<tool_call>{"name": "lamp", ']
PIECES += ['"arguments": {"on": true}}', "</tool_call>", "\n", "done"]


def events_of(after: int = -1, **fields: Any) -> ResponseEvents:
    formats = ChatFormats(tool_format("hermes"), reasoning_format("qwen3"))
    choice = ToolChoice(CallMode.AUTO, (Tool("lamp"),))
    parser = ChatJob("", (), None, choice, formats).parser()
    return ResponseEvents(ResponseHead("job_1", {**FIELDS, **fields}), parser, after=after)


def run(events: ResponseEvents, pieces: list[str], end: JobEnd) -> list[dict[str, Any]]:
    data = events.start()
    for place, piece in enumerate(pieces):
        data += events.of_chunk(Chunk(place, place + 1, (place,), piece, ""))
    data += events.of_end(end)
    found = []
    for block in data.decode().strip().split("\n\n") if data else []:
        kind, told = block.split("\n")
        found.append(json.loads(told.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    return found


def test_reasoning_text_and_calls_are_items_whose_events_make_the_whole() -> None:
    events = events_of()
    told = run(events, PIECES, JobEnd(state="done", finish_reason="stop"))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    body = told[-1]["response"]
    Response.model_validate(body)
    assert body == events.body and body["status"] == "completed"
    kinds = [item["type"] for item in body["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message"]
    reasoning, message, call, last = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert message["content"][0]["text"] == "So," and last["content"][0]["text"] == "done"
    assert (call["name"], json.loads(call["arguments"])) == ("lamp", {"on": True})
    assert rebuilt(told) == body["output"]
    assert all(item["status"] == "completed" for item in body["output"])
    assert body["usage"]["output_tokens"] == len(PIECES)


@pytest.mark.parametrize("after", [0, 3, 9, 30])
def test_events_are_the_same_behind_any_number(after: int) -> None:
    end = JobEnd(state="done", finish_reason="stop")
    whole = run(events_of(), PIECES, end)
    assert run(events_of(after), PIECES, end) == whole[after + 1 :]


@pytest.mark.parametrize(
    ("end", "kind", "status"),
    [
        (JobEnd(state="done", finish_reason="length"), "incomplete", "incomplete"),
        (JobEnd(state="cancelled"), "incomplete", "cancelled"),
        (JobEnd(state="expired", error="too late"), "failed", "failed"),
        (JobEnd(state="failed", error="too long"), "failed", "failed"),
    ],
)
def test_what_was_cut_off_says_so(end: JobEnd, kind: str, status: str) -> None:
    *_, last = run(events_of(), ["So"], end)
    body = last["response"]
    assert (last["type"], body["status"]) == (f"response.{kind}", status)
    assert body["output"][0]["status"] == "incomplete"
    assert (body["error"] or {}).get("message") == end.error
    assert (body["incomplete_details"] is not None) == (status == "incomplete")


def test_nothing_is_told_of_a_job_that_never_ran_but_its_end() -> None:
    told = run(events_of(background=True), [], JobEnd(state="cancelled"))
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds == ["created", "queued", "incomplete"]
    assert told[-1]["response"]["output"] == []


def test_who_goes_on_behind_the_error_of_a_stream_misses_nothing() -> None:
    events = events_of()
    told = events.start() + events.of_chunk(Chunk(0, 1, (0,), " So", ""))
    last = EVENT.validate_json(told.rpartition(b"data: ")[2])
    kind, data = events.of_error(STOPPING).decode().strip().split("\n")
    error = EVENT.validate_json(data.removeprefix("data: "))
    assert (kind, error.code) == ("event: error", "stopping")
    assert error.sequence_number == last.sequence_number
    again = run(events_of(after=error.sequence_number), [" So"], JobEnd(state="done"))
    assert again[0]["sequence_number"] == last.sequence_number + 1


def test_an_answer_without_text_is_an_empty_message() -> None:
    *_, last = run(events_of(), [], JobEnd(state="done", finish_reason="stop"))
    [message] = last["response"]["output"]
    assert message["content"][0]["text"] == ""


def rebuilt(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events before the last describe, delta by delta."""
    items: list[dict[str, Any]] = []
    for event in told[:-1]:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                items.append(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                content = items[event["output_index"]]["content"]
                content[event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
    return items
