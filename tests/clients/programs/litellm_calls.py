"""LiteLLM: chats, streams, tools, schemas, responses, fallbacks, and which errors it raises."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any, Literal

import litellm
from pydantic import BaseModel, Field

BASE_URL, MODEL = sys.argv[1:3]
HOSTED = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE_URL}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    """A city; any object that follows the schema is valid."""

    name: Literal["Paris", "Oslo"]
    is_capital: bool
    districts: int = Field(ge=1, le=99)


def main() -> None:
    litellm.suppress_debug_info = True
    text = a_chat()
    a_stream_tells_the_same(text)
    asyncio.run(chats_at_once(text))
    a_text_is_continued()
    a_tool_is_called()
    a_schema_is_followed()
    responses_are_made()
    asyncio.run(a_router_falls_back(text))
    errors_are_told_apart()
    ran = ["chat", "stream", "async", "text completion", "tools", "JSON schema", "responses"]
    ran += ["router", "errors"]
    print(json.dumps({"client": "litellm", "version": version("litellm"), "ran": ran}))


def a_chat() -> str:
    answer = litellm.completion(messages=QUESTION, temperature=0, max_tokens=24, **HOSTED)
    text = answer.choices[0].message.content
    assert "Paris" in text, answer
    assert answer.choices[0].finish_reason == "stop", answer
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 10, usage
    return text


def a_stream_tells_the_same(text: str) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, **HOSTED}
    chunks = list(litellm.completion(**asked, **options))
    assert len(chunks) > 2, chunks
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole.choices[0].message.content == text, whole
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 1, chunks[-1]


async def chats_at_once(text: str) -> None:
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, **HOSTED}
    answers = await asyncio.gather(*[litellm.acompletion(**asked) for _ in range(4)])
    assert [answer.choices[0].message.content for answer in answers] == [text] * 4, answers
    stream = await litellm.acompletion(**asked, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == text, parts


def a_text_is_continued() -> None:
    asked = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6, **HOSTED}
    whole = litellm.text_completion(**asked, logprobs=2)
    assert "Paris" in whole.choices[0].text, whole
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens == 6
    parts = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True)]
    assert "".join(parts) == whole.choices[0].text, parts


def a_tool_is_called() -> None:
    asked = {"tools": [WEATHER], "temperature": 0, "max_tokens": 60, **HOSTED}
    told: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ({"type": "function", "function": {"name": "weather"}}, "required"):
        answer = litellm.completion(messages=told, tool_choice=choice, **asked)
        assert answer.choices[0].finish_reason == "tool_calls", answer
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather", call
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo"), call
    told += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
    ]
    last = litellm.completion(messages=told, tool_choice="none", **asked).choices[0].message
    assert last.content and not last.tool_calls, last


def a_schema_is_followed() -> None:
    asked = {"temperature": 0, "max_tokens": 100, **HOSTED}
    messages = [{"role": "user", "content": "Paris is the capital of France. Describe it."}]
    answer = litellm.completion(messages=messages, response_format=City, **asked)
    City.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(
        messages=messages, response_format={"type": "json_object"}, stop=["}"], **asked
    )
    assert answer.choices[0].message.content.lstrip().startswith("{"), answer


def responses_are_made() -> None:
    asked = {"input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 24, **HOSTED}
    whole = litellm.responses(**asked)
    text = whole.output[-1].content[0].text
    assert "Paris" in text and whole.status == "completed", whole
    events = list(litellm.responses(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text, deltas
    assert events[-1].type == "response.completed", events[-1]


async def a_router_falls_back(text: str) -> None:
    names = {"wrong": "nonesuch", "right": MODEL}
    router = litellm.Router(
        [
            {
                "model_name": name,
                "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": BASE_URL},
            }
            for name, model in names.items()
        ],
        fallbacks=[{"wrong": ["right"]}],
        num_retries=0,
    )
    answer = await router.acompletion("wrong", QUESTION, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == text, answer


def errors_are_told_apart() -> None:
    long = [{"role": "user", "content": "on and on " * 4000}]
    wrong = (
        (litellm.NotFoundError, {**HOSTED, "model": "hosted_vllm/nonesuch", "messages": QUESTION}),
        (litellm.ContextWindowExceededError, {**HOSTED, "messages": long}),
        (litellm.BadRequestError, {**HOSTED, "messages": QUESTION, "temperature": -1}),
    )
    for expected, asked in wrong:
        try:
            litellm.completion(**asked, num_retries=0)
        except expected as error:
            assert type(error) is expected, repr(error)
        else:
            raise AssertionError(f"{expected} was not raised")


if __name__ == "__main__":
    main()
