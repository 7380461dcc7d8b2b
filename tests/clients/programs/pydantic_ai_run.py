"""Pydantic AI: typed output by tools and schemas, tools of one's own, and streams."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext, ToolOutput
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE_URL, MODEL = sys.argv[1:3]
EXAMPLE = '{"name": "Oslo", "is_capital": true, "districts": 15}'
QUESTION = f"Oslo as JSON is {EXAMPLE}. Write Paris as JSON."
BRIEF = ModelSettings(temperature=0, max_tokens=150)
#: An object that follows a schema ends by itself.
LONG = ModelSettings(temperature=0, max_tokens=1000)


class City(BaseModel):
    """A city; any object that follows the schema is valid."""

    name: Literal["Paris", "Oslo"]
    is_capital: bool
    districts: int = Field(ge=1, le=99)


def main() -> None:
    provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
    asyncio.run(run_all(OpenAIChatModel(MODEL, provider=provider)))
    asyncio.run(run_all(OpenAIResponsesModel(MODEL, provider=provider)))
    kinds = ("text", "tool output", "native output", "tool", "stream", "typed stream")
    ran = [f"{api} {kind}" for api in ("chat", "responses") for kind in kinds]
    name = "pydantic-ai-slim"
    print(json.dumps({"client": name, "version": version(name), "ran": ran}))


async def run_all(model: Model) -> None:
    told = await Agent(model, model_settings=BRIEF).run("What is the capital of France?")
    assert told.output.strip(), told
    assert told.usage.output_tokens > 0, told.usage
    for kind in (ToolOutput(City), NativeOutput(City)):
        agent = Agent(model, output_type=kind, model_settings=LONG, retries=0)
        found = await agent.run(QUESTION)
        assert isinstance(found.output, City), found.output
    await a_tool_is_called(model)
    await text_is_streamed(model)
    await a_type_is_streamed(model)


async def a_tool_is_called(model: Model) -> None:
    asked_for: list[str] = []

    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """Tell the weather of a city."""
        asked_for.append(city)
        return "sunny"

    agent = Agent(model, tools=[weather], model_settings=first_the_tool, retries=0)
    result = await agent.run("What is the weather in Paris?")
    assert len(asked_for) == 1, asked_for
    parts = [part for message in result.all_messages() for part in message.parts]
    [call] = [part for part in parts if isinstance(part, ToolCallPart)]
    [told] = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert call.args_as_dict() == {"city": asked_for[0]}, call
    assert (told.tool_call_id, told.content) == (call.tool_call_id, "sunny"), told
    assert isinstance(result.output, str), result


def first_the_tool(context: RunContext) -> ModelSettings:
    """What a weak model would not do by itself."""
    choice = ["weather"] if context.run_step == 1 else "none"
    return ModelSettings(tool_choice=choice, parallel_tool_calls=False, **BRIEF)


async def text_is_streamed(model: Model) -> None:
    async with Agent(model, model_settings=BRIEF).run_stream(QUESTION) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        whole = await run.get_output()
    assert len(pieces) > 1, pieces
    assert "".join(pieces) == whole, (pieces, whole)


async def a_type_is_streamed(model: Model) -> None:
    agent = Agent(model, output_type=NativeOutput(City), model_settings=LONG, retries=0)
    async with agent.run_stream(QUESTION) as run:
        seen = [city async for city in run.stream_output(debounce_by=None)]
    assert isinstance(seen[-1], City), seen


if __name__ == "__main__":
    main()
