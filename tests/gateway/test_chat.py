"""Chats through OpenAI's own client, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

import openai
from gateway.client import ask
from gateway.conftest import MODEL, Site
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill import Producer

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
#: What the test's chat template makes of it.
HELLO_PROMPT = "user: hello\nassistant: "

SWITCH: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}},
                "required": ["on"],
            },
        },
    }
    for name in ("lamp", "fan")
]


class Light(BaseModel):
    color: Literal["red", "green"]
    is_on: bool


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_a_chat_is_the_completion_of_its_rendered_prompt(
    client: openai.OpenAI, producer: Producer
) -> None:
    told = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=12, temperature=0.8, seed=4
    )
    ids = byte_level_tokenizer().encode(HELLO_PROMPT)
    expected = producer.submit(ids, max_tokens=12, temperature=0.8, seed=4).result()
    [choice] = told.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert told.usage is not None and told.usage.prompt_tokens == len(ids)
    assert told.usage.completion_tokens == expected.usage.completion_tokens
    assert told.object == "chat.completion" and told.model == MODEL


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_completion_tokens": 30, "seed": 9, "extra_body": {"top_k": 50}}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **options)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    first, *parts, last = list(stream)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_tell_the_bytes_of_each_token(client: openai.OpenAI, producer: Producer) -> None:
    told = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    ids = byte_level_tokenizer().encode(HELLO_PROMPT)
    expected = producer.submit(ids, max_tokens=6, temperature=0, logprobs=2).result()
    logprobs = told.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and expected.logprobs is not None
    assert [each.logprob for each in logprobs.content] == [e.logprob for e in expected.logprobs]
    assert [len(each.top_logprobs) for each in logprobs.content] == [2] * 6
    joined = b"".join(bytes(each.bytes or ()) for each in logprobs.content)
    assert joined.decode("utf-8", "replace") == told.choices[0].message.content


def test_several_answers_differ_and_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "seed": 1, "n": 3}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    streamed = {0: "", 1: "", 2: ""}
    for part in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **options):
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts


def test_a_required_call_is_made_and_has_its_id_in_the_stream_too(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "tools": SWITCH,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 1,
    }
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **options)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name in ("lamp", "fan")
    assert call.function.arguments in ('{"on": true}', '{"on": false}')
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    with client.chat.completions.stream(model=MODEL, messages=HELLO, **options) as stream:
        final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.name == call.function.name and streamed.id.startswith("call_")
    assert final.finish_reason == "tool_calls"


def test_a_named_call_is_of_that_tool(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=SWITCH,
        tool_choice={"type": "function", "function": {"name": "fan"}},
        # Instructor sends both; it is the form of texts, of which there is none.
        response_format={"type": "json_object"},
        max_tokens=200,
    )
    [call] = told.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "fan"
    # The schema does not say that there are no others, as most clients' do not.
    assert json.loads(call.function.arguments).keys() == {"on"}


def test_an_answer_is_parsed_as_the_class_it_was_asked_for(client: openai.OpenAI) -> None:
    told = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Light, max_tokens=300, seed=2
    )
    parsed = told.choices[0].message.parsed
    assert isinstance(parsed, Light)


def test_a_conversation_with_calls_and_their_results_goes_on(site: Site) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "lamp", "arguments": '{"on": true}'},
    }
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "on"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    told = ask(site, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    rendered = byte_level_tokenizer().decode(told["prompt_token_ids"])
    expected = '{"name": "lamp", "arguments": {"on": true}}'
    assert rendered == (
        f"system: short\nuser: on\nassistant: <tool_call>{expected}</tool_call>\n"
        "tool: done\nassistant: "
    )


def test_the_last_message_can_be_gone_on_with(site: Site) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    told = ask(
        site,
        "/v1/chat/completions",
        messages=messages,
        max_tokens=1,
        return_token_ids=True,
        continue_final_message=True,
    )
    rendered = byte_level_tokenizer().decode(told["prompt_token_ids"])
    assert rendered == "user: hello\nassistant: I am"


def test_a_job_keeps_to_the_forms_of_vllm(site: Site) -> None:
    for form in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes"]}):
        told = ask(site, "/v1/chat/completions", messages=HELLO, max_tokens=9, **form)
        assert told["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.asyncio
async def test_the_asynchronous_client_is_served_too(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="x") as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, max_tokens=5
        )
        reasons = [part.choices[0].finish_reason async for part in stream]
    assert reasons[-1] in ("length", "stop") and set(reasons[:-1]) == {None}


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 3000}]
        )
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    # LiteLLM, LangChain and others look for these words.
    assert "prompt is too long" in long.value.message
    assert "this model's maximum context length is" in long.value.message
