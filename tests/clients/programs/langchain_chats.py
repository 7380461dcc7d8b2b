"""LangChain's ChatOpenAI and OpenAI: chats, batches, streams, tools, schemas, and its errors."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.exceptions import ContextOverflowError, ModelNotFoundError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

BASE_URL, MODEL = sys.argv[1:3]
SERVER = {"base_url": BASE_URL, "api_key": "none"}
QUESTION = "What is the capital of France?"
llm = ChatOpenAI(model=MODEL, temperature=0, max_tokens=80, **SERVER)


class City(BaseModel):
    """A city; any object that follows the schema is valid."""

    name: Literal["Paris", "Oslo"]
    is_capital: bool
    districts: int = Field(ge=1, le=99)


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"It is sunny in {city}."


def main() -> None:
    text = a_chat()
    a_stream_tells_the_same(text)
    asyncio.run(asynchronously(text))
    a_text_is_continued()
    a_tool_is_called()
    schemas_are_followed()
    responses_are_made(text)
    errors_are_told_apart()
    ran = ["chat", "stream", "async batch", "chain", "completion", "tools", "streamed tool calls"]
    ran += ["structured output", "responses", "errors"]
    name = "langchain-openai"
    versions = f"{version(name)} (langchain {version('langchain')})"
    print(json.dumps({"client": name, "version": versions, "ran": ran}))


def a_chat() -> str:
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert isinstance(answer.content, str) and "Paris" in answer.content, answer
    assert answer.response_metadata["finish_reason"] == "stop", answer
    assert answer.response_metadata["model_name"] == MODEL, answer
    usage = answer.usage_metadata
    assert usage is not None, answer
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 10, usage
    told = answer.response_metadata["logprobs"]["content"]
    assert "".join(each["token"] for each in told).startswith(answer.content), told
    assert all(len(each["top_logprobs"]) == 2 for each in told), told
    return answer.content


def a_stream_tells_the_same(text: str) -> None:
    first, *others = list(llm.stream(QUESTION, stream_usage=True))
    whole = sum(others, first)
    assert whole.content == text and len(others) > 1, whole
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 1, whole


async def asynchronously(text: str) -> None:
    await chats_at_once(text)
    await a_streamed_call_is_whole()


async def chats_at_once(text: str) -> None:
    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
    chain = prompt | llm | StrOutputParser()
    assert await chain.abatch([{"country": "France"}] * 4) == [text] * 4
    parts = [part async for part in chain.astream({"country": "France"})]
    assert "".join(parts) == text and len(parts) > 1, parts


def a_text_is_continued() -> None:
    model = OpenAI(model=MODEL, temperature=0, max_tokens=6, **SERVER)
    whole = model.invoke("The capital of France is")
    assert "Paris" in whole, whole
    assert "".join(model.stream("The capital of France is")) == whole
    both = model.generate(["The capital of France is", "One, two, three,"])
    assert both.generations[0][0].text == whole and both.generations[1][0].text, both
    assert both.llm_output["token_usage"]["completion_tokens"] == 12, both.llm_output


def a_tool_is_called() -> None:
    asked = [HumanMessage("What is the weather in Paris?")]
    for choice in ("weather", "any"):
        bound = llm.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(asked)
        [call] = answer.tool_calls
        assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Oslo"), call
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.tool_call_id == call["id"], result
    last = llm.bind_tools([weather], tool_choice="none").invoke([*asked, answer, result])
    assert isinstance(last, AIMessage) and last.content and not last.tool_calls, last


async def a_streamed_call_is_whole() -> None:
    bound = llm.bind_tools([weather], tool_choice="weather", strict=True)
    first, *others = [chunk async for chunk in bound.astream("What is the weather in Paris?")]
    whole = sum(others, first)
    assert len(whole.tool_calls) == 1, whole
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Oslo"), whole
    assert whole.response_metadata["finish_reason"] == "tool_calls", whole


def schemas_are_followed() -> None:
    asked = "Paris is the capital of France. Describe it."
    for method in ("json_schema", "function_calling"):
        found = llm.with_structured_output(City, method=method).invoke(asked)
        assert isinstance(found, City), found
    told = llm.with_structured_output(None, method="json_mode", include_raw=True).invoke(asked)
    assert told["raw"].content.lstrip().startswith("{"), told
    parts = list(llm.with_structured_output(City.model_json_schema(), strict=True).stream(asked))
    assert len(parts) > 1, parts
    City.model_validate(parts[-1])


def responses_are_made(text: str) -> None:
    model = ChatOpenAI(model=MODEL, temperature=0, use_responses_api=True, **SERVER)
    answer = model.invoke(QUESTION, max_tokens=80)
    assert answer.text == text, answer
    assert "".join(chunk.text for chunk in model.stream(QUESTION, max_tokens=80)) == text
    bound = model.bind_tools([weather], tool_choice="weather")
    [call] = bound.invoke("What is the weather in Paris?", max_tokens=80).tool_calls
    assert call["name"] == "weather", call
    assert isinstance(model.with_structured_output(City).invoke(QUESTION, max_tokens=80), City)


def errors_are_told_apart() -> None:
    wrong = (
        (ModelNotFoundError, llm.model_copy(update={"model_name": "nonesuch"}), QUESTION),
        (ContextOverflowError, llm, "on and on " * 4000),
    )
    for expected, model, asked in wrong:
        try:
            model.invoke(asked)
        except expected:
            continue
        raise AssertionError(f"{expected} was not raised")


if __name__ == "__main__":
    main()
