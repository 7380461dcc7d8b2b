"""OpenAI's Agents SDK: a tool is called and its result goes back, over both of its APIs."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from agents.result import RunResultBase
from pydantic import BaseModel, Field

from openai import AsyncOpenAI

BASE_URL, MODEL = sys.argv[1:3]
BRIEF = {"temperature": 0, "max_tokens": 150}
#: An object that follows a schema ends by itself.
LONG = {"temperature": 0, "max_tokens": 1000}

asked_for: list[str] = []


class Forecast(BaseModel):
    """Any object that follows the schema is valid."""

    sky: Literal["clear", "cloudy"]
    degrees: int = Field(ge=-20, le=40)


@function_tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather of a city."""
    asked_for.append(city)
    return f"The weather of {city} is sunny."


def main() -> None:
    set_tracing_disabled(True)
    asyncio.run(run_all())
    ran = ["chat tool run", "chat output type", "chat stream"]
    ran += ["responses tool run", "responses output type", "responses stream"]
    print(json.dumps({"client": "openai-agents", "version": version("openai-agents"), "ran": ran}))


async def run_all() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        for model in (
            OpenAIChatCompletionsModel(MODEL, openai_client=client),
            OpenAIResponsesModel(MODEL, openai_client=client),
        ):
            await a_tool_is_run(model)
            await a_type_is_filled(model)
            await a_run_is_streamed(model)


def caller(model: Model) -> Agent[None]:
    """The first turn must call the tool; the SDK lifts that for the second."""
    settings = ModelSettings(tool_choice="weather", include_usage=True, **BRIEF)
    return Agent("Helper", model=model, tools=[weather], model_settings=settings)


async def a_tool_is_run(model: Model) -> None:
    asked_for.clear()
    result = await Runner.run(caller(model), "What is the weather in Paris?", max_turns=2)
    assert len(asked_for) == 1, asked_for
    check_calls(result)


async def a_run_is_streamed(model: Model) -> None:
    asked_for.clear()
    run = Runner.run_streamed(caller(model), "What is the weather in Paris?", max_turns=2)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert len(asked_for) == 1, asked_for
    assert "".join(deltas) == run.final_output, (deltas, run.final_output)
    check_calls(run)


def check_calls(result: RunResultBase) -> None:
    kinds = [type(item) for item in result.new_items]
    assert kinds[:2] == [ToolCallItem, ToolCallOutputItem], kinds
    call, output = result.new_items[:2]
    assert json.loads(call.raw_item.arguments)["city"] == asked_for[0]
    assert output.output == f"The weather of {asked_for[0]} is sunny."
    assert result.final_output.strip(), result.final_output
    usage = result.context_wrapper.usage
    assert usage.requests == 2, usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0, usage


async def a_type_is_filled(model: Model) -> None:
    settings = ModelSettings(**LONG)
    agent = Agent("Prophet", model=model, output_type=Forecast, model_settings=settings)
    result = await Runner.run(agent, "What will the weather be in Paris?", max_turns=1)
    assert isinstance(result.final_output, Forecast), result.final_output


if __name__ == "__main__":
    main()
