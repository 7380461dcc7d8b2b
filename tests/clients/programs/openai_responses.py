"""Responses with OpenAI's client: python openai_responses.py BASE_URL MODEL"""

import asyncio
import json
import sys
import time

from pydantic import BaseModel

import openai

BASE_URL, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=BASE_URL, api_key="none")
QUESTION = "What is the capital of France?"
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
LAMP = {
    "type": "function",
    "name": "switch_lamp",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Lamp(BaseModel):
    on: bool


def create() -> None:
    response = client.responses.create(input=QUESTION, instructions="Be brief.", **GREEDY)
    assert "Paris" in response.output_text and response.status == "completed"
    assert response.usage.output_tokens > 0
    assert client.responses.retrieve(response.id).output_text == response.output_text


def stream() -> None:
    events = list(client.responses.create(input=QUESTION, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(deltas) == events[-1].response.output_text


def stream_helper() -> None:
    with client.responses.stream(input=QUESTION, **GREEDY) as helper:
        deltas = [event.delta for event in helper if event.type == "response.output_text.delta"]
        final = helper.get_final_response()
    assert "".join(deltas) == final.output_text and "Paris" in final.output_text


def parse() -> None:
    response = client.responses.parse(
        model=MODEL, input="Switch on the lamp.", text_format=Lamp, temperature=0
    )
    assert isinstance(response.output_parsed, Lamp)


def tools() -> None:
    named = {"type": "function", "name": "switch_lamp"}
    asked = client.responses.create(
        model=MODEL, input="Switch on the lamp.", tools=[LAMP], tool_choice=named, temperature=0
    )
    [call] = asked.output
    assert call.type == "function_call" and Lamp.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is lit."}
    after = client.responses.create(input=[output], previous_response_id=asked.id, **GREEDY)
    assert after.output_text
    items = list(client.responses.input_items.list(after.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def conversation() -> None:
    first = client.responses.create(input="My favourite colour is green.", **GREEDY)
    second = client.responses.create(
        input="Which colour is my favourite?", previous_response_id=first.id, **GREEDY
    )
    assert "green" in second.output_text.lower()
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


def background() -> None:
    response = client.responses.create(input=QUESTION, background=True, **GREEDY)
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        response = client.responses.retrieve(response.id)
    assert response.status == "completed" and "Paris" in response.output_text


def cancel() -> None:
    response = client.responses.create(
        model=MODEL, input=QUESTION, background=True, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(response.id).status == "cancelled"


def resume() -> None:
    options = GREEDY | {"background": True, "stream": True}
    with client.responses.create(input=QUESTION, **options) as broken_off:
        seen = [event for event, _ in zip(broken_off, range(4), strict=False)]
    response_id, last = seen[0].response.id, seen[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    assert rest[0].sequence_number == last + 1 and rest[-1].type == "response.completed"
    assert "Paris" in rest[-1].response.output_text


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as other:
        response = await other.responses.create(input=QUESTION, **GREEDY)
        stream = await other.responses.create(input=QUESTION, stream=True, **GREEDY)
        events = [event async for event in stream]
        assert events[-1].response.output_text == response.output_text


for step in (create, stream, stream_helper, parse, tools, conversation, background, cancel, resume):
    step()
asyncio.run(asynchronous())
ran = ["responses", "background", "resumption"]
print(json.dumps({"client": "openai", "version": openai.__version__, "ran": ran}))
