"""Chats and completions with OpenAI's client: python openai_chat.py BASE_URL MODEL"""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel

import openai

BASE_URL, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=BASE_URL, api_key="none")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}},
    },
}


class Capital(BaseModel):
    city: str
    continent: Literal["Africa", "Asia", "Europe"]
    is_coastal: bool


def chat() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=16
    )
    [choice] = answer.choices
    assert "Paris" in choice.message.content and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def chat_stream() -> None:
    parts = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    *told, last = list(parts)
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in told)
    assert len(told) > 3 and last.choices == [] and last.usage.completion_tokens > 3


def stream_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=16
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content


def several_turns() -> None:
    messages = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "Say hello."}]},
        {"role": "assistant", "content": "Hello."},
        *QUESTION,
    ]
    answers = client.chat.completions.create(
        model=MODEL, messages=messages, n=3, seed=1, max_tokens=8, stop=["\n"]
    )
    assert [choice.index for choice in answers.choices] == [0, 1, 2]


def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(token.top_logprobs[0].token == token.token for token in tokens)
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)


def parsed_output() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe the capital of France as JSON."}],
        response_format=Capital,
        temperature=0,
        max_tokens=60,
    )
    assert isinstance(answer.choices[0].message.parsed, Capital)


def parsed_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Capital, temperature=0, max_tokens=60
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Capital)


def json_object() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A JSON object with the key city, please."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
    )
    [choice] = answer.choices
    # A small model may write on until it may no longer.
    assert choice.message.content.lstrip().startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def tool_auto() -> None:
    message = (
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[WEATHER, TIME], temperature=0, max_tokens=60
        )
        .choices[0]
        .message
    )
    assert message.content or message.tool_calls


def tool_none() -> None:
    message = (
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="none", max_tokens=8
        )
        .choices[0]
        .message
    )
    assert message.content and not message.tool_calls


def tool_required() -> None:
    choice = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER, TIME],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    ).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name in ("get_weather", "get_time")
    assert isinstance(json.loads(call.function.arguments), dict)


def tool_named_and_its_result() -> None:
    messages = [{"role": "user", "content": "How is the weather in Paris, in celsius?"}]
    options = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(messages=messages, tool_choice=named, **options)
    [call] = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and arguments.keys() == {"city", "unit"}
    messages += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    after = client.chat.completions.create(messages=messages, **options)
    assert after.choices[0].message.content or after.choices[0].message.tool_calls


def tool_stream() -> None:
    parts = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
        stream=True,
    )
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "get_weather" and calls[0].id
    first = [call.function.arguments or "" for call in calls if call.index == 0]
    assert json.loads("".join(first))["unit"] in ("celsius", "kelvin")


def completion() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert answer.choices[0].text.startswith(" Paris") and answer.object == "text_completion"


def completions_of_several() -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    parts = client.completions.create(model=MODEL, prompt=prompts, max_tokens=4, stream=True)
    assert {choice.index for part in parts for choice in part.choices} == {0, 1}


def echo_with_logprobs() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", echo=True, logprobs=1, max_tokens=0
    )
    told = answer.choices[0].logprobs
    assert "".join(told.tokens) == answer.choices[0].text == "The capital of France is"
    assert told.token_logprobs[0] is None and all(each < 0 for each in told.token_logprobs[1:])


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as others:

        async def ask(country: str) -> str:
            stream = await others.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
                temperature=0,
                max_tokens=16,
                stream=True,
            )
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        paris, rome = await asyncio.gather(ask("France"), ask("Italy"))
        assert "Paris" in paris and rome and rome != paris
        answer = await others.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Capital, temperature=0, max_tokens=60
        )
        assert isinstance(answer.choices[0].message.parsed, Capital)


STEPS = (
    *(chat, chat_stream, stream_helper, several_turns, logprobs),
    *(parsed_output, parsed_stream, json_object),
    *(tool_auto, tool_none, tool_required, tool_named_and_its_result, tool_stream),
    *(completion, completions_of_several, echo_with_logprobs),
)
for step in STEPS:
    step()
asyncio.run(asynchronous())
ran = ["chat", "streams", "logprobs", "parsed output", "tools", "completions", "async"]
print(json.dumps({"client": "openai", "version": openai.__version__, "ran": ran}))
