"""LlamaIndex's OpenAILike: chats, completions, streams, tools and structured output."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel, Field

import openai

BASE_URL, MODEL = sys.argv[1:3]
QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city; any object that follows the schema is valid."""

    name: Literal["Paris", "Oslo"]
    is_capital: bool
    districts: int = Field(ge=1, le=99)


def model(**options: object) -> OpenAILike:
    """What the documentation of LlamaIndex tells its users to write."""
    server = {"api_base": BASE_URL, "api_key": "none", "context_window": 8192}
    usual = {"model": MODEL, "temperature": 0, "max_tokens": 80, "is_chat_model": True}
    return OpenAILike(**{**server, **usual, **options})


def main() -> None:
    text = a_chat()
    asyncio.run(chats_at_once(text))
    a_text_is_continued()
    tools_are_called()
    schemas_are_followed()
    a_response_is_made(text)
    an_unknown_model_is_told()
    ran = ["chat", "stream", "async", "completion", "tools", "structured output", "responses"]
    name = "llama-index-llms-openai-like"
    versions = f"{version(name)} (core {version('llama-index-core')})"
    print(json.dumps({"client": name, "version": versions, "ran": [*ran, "errors"]}))


def a_chat() -> str:
    asked = [ChatMessage(role="system", content="Be brief."), ChatMessage(content=QUESTION)]
    answer = model().chat(asked)
    text = answer.message.content
    assert text and "Paris" in text, answer
    assert answer.additional_kwargs["completion_tokens"] > 1, answer
    parts = list(model().stream_chat(asked))
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content == text
    assert len(parts) > 1, parts
    return str(model().complete(QUESTION))


async def chats_at_once(text: str) -> None:
    answers = await asyncio.gather(*[model().acomplete(QUESTION) for _ in range(4)])
    assert [answer.text for answer in answers] == [text] * 4, answers
    stream = await model().astream_chat([ChatMessage(content=QUESTION)])
    assert "".join([part.delta or "" async for part in stream]) == text


def a_text_is_continued() -> None:
    plain = model(is_chat_model=False, max_tokens=6)
    whole = plain.complete("The capital of France is")
    assert "Paris" in whole.text, whole
    parts = list(plain.stream_complete("The capital of France is"))
    assert parts[-1].text == whole.text and len(parts) > 1, parts


def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"It is sunny in {city}."


def tools_are_called() -> None:
    caller = model(is_function_calling_model=True)
    tools = [FunctionTool.from_defaults(weather)]
    asked = "What is the weather in Paris?"
    answer = caller.chat_with_tools(tools, asked, tool_required=True)
    [call] = caller.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Paris", "Oslo"), call
    *_, last = caller.stream_chat_with_tools(tools, asked, tool_required=True)
    [streamed] = caller.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs, streamed
    told = caller.predict_and_call(tools, asked, tool_required=True)
    assert told.response in ("It is sunny in Paris.", "It is sunny in Oslo."), told


def schemas_are_followed() -> None:
    prompt = PromptTemplate("{city} is the capital of France. Describe it.")
    filler = model(should_use_structured_outputs=True)
    assert isinstance(filler.structured_predict(City, prompt, city="Paris"), City)
    caller = model(is_function_calling_model=True)
    assert isinstance(caller.structured_predict(City, prompt, city="Paris"), City)
    answer = filler.as_structured_llm(City).complete("Paris is the capital of France.")
    assert isinstance(answer.raw, City), answer
    *_, last = filler.stream_structured_predict(City, prompt, city="Paris")
    City.model_validate(last.model_dump())


def a_response_is_made(text: str) -> None:
    server = {"api_base": BASE_URL, "api_key": "none", "context_window": 8192}
    responder = OpenAILikeResponses(model=MODEL, temperature=0, max_output_tokens=80, **server)
    assert responder.complete(QUESTION).text == text
    parts = [part.delta for part in responder.stream_complete(QUESTION)]
    assert "".join(part for part in parts if part) == text, parts


def an_unknown_model_is_told() -> None:
    try:
        model(model="nonesuch").complete(QUESTION)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("a model that is not there has answered")


if __name__ == "__main__":
    main()
