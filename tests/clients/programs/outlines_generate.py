"""Outlines: JSON, regular expressions and choices, through vLLM's fields and OpenAI's."""

import asyncio
import json
import re
import sys
from importlib.metadata import version
from typing import Literal

import outlines
from outlines.types import Regex
from pydantic import BaseModel, Field

import openai

BASE_URL, MODEL = sys.argv[1:3]
EXAMPLE = '{"name": "Oslo", "is_capital": true, "districts": 15}'
QUESTION = f"Oslo as JSON is {EXAMPLE}. Write Paris as JSON."
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])"


class City(BaseModel):
    """A city; any object that follows the schema is valid."""

    name: Literal["Paris", "Oslo"]
    is_capital: bool
    districts: int = Field(ge=1, le=99)


def main() -> None:
    client = openai.OpenAI(base_url=BASE_URL, api_key="none")
    vllm_style(outlines.from_vllm(client, MODEL))
    openai_style(outlines.from_openai(client, MODEL))
    asyncio.run(asynchronously())
    ran = ["vllm json", "vllm regex", "vllm choice", "vllm stream", "openai json", "async"]
    print(json.dumps({"client": "outlines", "version": version("outlines"), "ran": ran}))


def vllm_style(model: outlines.models.VLLM) -> None:
    City.model_validate_json(model(QUESTION, City, max_tokens=1000, temperature=0))
    date = model("When was the Eiffel tower built?", Regex(DATE), max_tokens=20)
    assert re.fullmatch(DATE, date), date
    verdict = model("Is the sky blue?", Literal["certainly", "hardly"], max_tokens=20)
    assert verdict in ("certainly", "hardly"), verdict
    pieces = list(model.stream(QUESTION, City, max_tokens=1000, temperature=0))
    assert len(pieces) > 1, pieces
    City.model_validate_json("".join(pieces))
    both = model(QUESTION, City, n=2, max_tokens=1000)
    assert [City.model_validate_json(one) for one in both]
    assert len(both) == 2, both


def openai_style(model: outlines.models.OpenAI) -> None:
    City.model_validate_json(model(QUESTION, City, max_tokens=1000, temperature=0))
    assert model("Say hello.", max_tokens=8)


async def asynchronously() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        model = outlines.from_vllm(client, MODEL)
        found = await model("Is the sky blue?", Literal["certainly", "hardly"], max_tokens=20)
    assert found in ("certainly", "hardly"), found


if __name__ == "__main__":
    main()
