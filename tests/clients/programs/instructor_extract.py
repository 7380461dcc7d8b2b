"""Instructor: models filled through tools, JSON mode, JSON schemas and the Responses API."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

import instructor
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field, model_validator

from openai import AsyncOpenAI, OpenAI

BASE_URL, MODEL = sys.argv[1:3]
EXAMPLE = '{"name": "Oslo", "country": "Norway", "is_capital": true, "districts": 15}'
QUESTION = f"Oslo as JSON is {EXAMPLE}. Write Paris as JSON."
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 1400,
}


class City(BaseModel):
    """A city; any object that follows the schema is valid."""

    name: Literal["Paris", "Oslo"]
    country: Literal["France", "Norway"]
    is_capital: bool
    districts: int = Field(ge=1, le=99)


class Journey(BaseModel):
    """Some cities; a list without bounds need not end."""

    cities: list[City] = Field(min_length=2, max_length=3)


class Anything(BaseModel):
    """Any JSON object, which is what JSON mode promises."""

    model_config = ConfigDict(extra="allow")


class Rejected(City):
    """Follows the schema, and is refused all the same: a server cannot know."""

    @model_validator(mode="after")
    def _refuse(self) -> "Rejected":
        raise ValueError("describe another one")


def main() -> None:
    client = OpenAI(base_url=BASE_URL, api_key="none")
    ran = [mode_works(client, mode) for mode in ("TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS")]
    json_mode_gives_an_object(client)
    a_miss_is_asked_again(client)
    partial_models_grow(client)
    several_are_found(client)
    asyncio.run(asynchronously())
    ran += ["JSON", "reask", "partial", "list", "async"]
    print(json.dumps({"client": "instructor", "version": version("instructor"), "ran": ran}))


def mode_works(client: OpenAI, mode: str) -> str:
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    asked = dict(ASKED)
    if mode.startswith("RESPONSES"):
        asked["max_output_tokens"] = asked.pop("max_tokens")
    city = patched.create(response_model=City, max_retries=0, **asked)
    assert isinstance(city, City), city
    assert city.name in ("Paris", "Oslo")
    assert 1 <= city.districts <= 99
    return mode


def json_mode_gives_an_object(client: OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON)
    found, completion = patched.create_with_completion(response_model=Anything, **ASKED)
    assert isinstance(found, Anything), found
    assert completion.choices[0].message.content.lstrip().startswith("{")
    assert completion.usage.completion_tokens > 0


def a_miss_is_asked_again(client: OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    try:
        patched.create(response_model=Rejected, max_retries=1, **ASKED)
    except InstructorRetryException as error:
        assert error.n_attempts == 2, error.n_attempts
    else:
        raise AssertionError("what is always refused was taken")


def partial_models_grow(client: OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    seen = list(patched.create_partial(response_model=City, **ASKED))
    assert len(seen) > 3, seen
    assert seen[0].districts is None, seen[0]
    City.model_validate(seen[-1].model_dump())


def several_are_found(client: OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    found = patched.create(response_model=Journey, max_retries=0, **ASKED)
    assert all(isinstance(city, City) for city in found.cities), found


async def asynchronously() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        asked = [patched.create(response_model=City, max_retries=0, **ASKED) for _ in range(4)]
        cities = await asyncio.gather(*asked)
    assert len({city.model_dump_json() for city in cities}) == 1, cities


if __name__ == "__main__":
    main()
