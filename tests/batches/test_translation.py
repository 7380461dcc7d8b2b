"""What requests of batches mean: jobs, and answers made of their results."""

import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from support.fake_mill import FakeMill, make_tokenizer
from tidemill.batches.openai_requests import OpenAITranslator
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.state import GatewayState
from tidemill.protocol.batches import ENDPOINTS
from tidemill.protocol.errors import InvalidRequest, UnknownModel
from tidemill.protocol.messages import Usage
from tidemill.protocol.outcomes import Outcome, Vectors
from tidemill.protocol.requests import EmbedRequest
from tidemill.protocol.states import JobState
from tidemill.result import Result

VECTORS = [[0.5, -1.25], [3.0, 0.0]]


@pytest.fixture
async def translator(redis_client: redis.Redis, redis_url: str) -> AsyncIterator[OpenAITranslator]:
    mill = FakeMill(redis_client, tokenizer=make_tokenizer("user", "assistant", "hello"))
    state = GatewayState(GatewaySettings(redis_url=redis_url))
    yield OpenAITranslator(state, "default")
    mill.end_all()
    await state.close()


def result(**fields: Any) -> Result:
    return Result(
        **{
            "job_id": "job_1",
            "state": JobState.DONE,
            "text": "so",
            "token_ids": (3, 4),
            "finish_reason": "stop",
            "stop_reason": None,
            "usage": Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1),
            **fields,
        }
    )


@pytest.mark.parametrize("allow_private", [False, True])
async def test_a_line_may_name_no_callback_on_our_side_unless_that_is_allowed(
    redis_client: redis.Redis, redis_url: str, allow_private: bool
) -> None:
    mill = FakeMill(redis_client)
    settings = GatewaySettings(redis_url=redis_url, allow_private_webhooks=allow_private)
    state = GatewayState(settings)
    body = {"model": "m", "prompt": [1], "callback_url": "http://127.0.0.1:5000/"}
    line = OpenAITranslator(state, "default").translate("/v1/completions", body)
    if allow_private:
        assert (await line).specs[0].callback_url == body["callback_url"]
    else:
        with pytest.raises(InvalidRequest, match="callback_url: only https") as refused:
            await line
        assert refused.value.field == "callback_url"
    mill.end_all()
    await state.close()


async def test_a_chat_is_one_job_and_its_answer_a_chat(translator: OpenAITranslator) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    found = await translator.translate("/v1/chat/completions", body)
    [spec] = found.specs
    assert spec.prompt == (1, 3, 2)
    told = found.answer([result()])
    assert told["object"] == "chat.completion" and told["model"] == "m"
    assert told["choices"][0]["message"]["content"] == "so"
    assert told["usage"]["total_tokens"] == 7
    assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_several_prompts_are_several_jobs_and_one_answer(
    translator: OpenAITranslator,
) -> None:
    body = {"model": "m", "prompt": ["hello", [1, 2]], "max_tokens": 3}
    found = await translator.translate("/v1/completions", body)
    assert [spec.prompt for spec in found.specs] == ["hello", (1, 2)]
    told = found.answer([result(), result(text="it")])
    assert [(c["index"], c["text"]) for c in told["choices"]] == [(0, "so"), (1, "it")]


async def test_a_response_is_one_job_and_its_answer_a_response(
    translator: OpenAITranslator,
) -> None:
    body = {"model": "m", "input": "hello", "background": True, "stream": True}
    found = await translator.translate("/v1/responses", body)
    [spec] = found.specs
    assert spec.prompt == (1, 3, 2) and found.prompt_field == "input"
    told = found.answer([result(job_id="job_1")])
    assert told["object"] == "response" and told["model"] == "m" and told["id"] == "resp_job_1"
    assert told["status"] == "completed" and not told["background"] and not told["store"]
    [message] = told["output"]
    assert message["content"][0]["text"] == "so"
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (5, 2)


@pytest.mark.parametrize("form", ["float", "base64", None])
async def test_embeddings_are_told_as_numbers_or_as_text(
    translator: OpenAITranslator, form: str | None
) -> None:
    body = {"model": "m", "input": ["a", "b"], "dimensions": 2, "encoding_format": form}
    found = await translator.translate("/v1/embeddings", body)
    [spec] = found.specs
    request = spec.draft("default").request
    assert isinstance(request, EmbedRequest)
    assert (request.inputs, request.dimensions) == (("a", "b"), 2)
    outcome = Outcome(vectors=Vectors.of(VECTORS, 2))
    told = found.answer([result(outcome=outcome, usage=Usage(prompt_tokens=4))])
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    rows = [each["embedding"] for each in told["data"]]
    if form == "base64":
        rows = [list(struct.unpack("<2f", base64.b64decode(row))) for row in rows]
    assert rows == VECTORS and [each["index"] for each in told["data"]] == [0, 1]


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/completions", {"model": "m"}, "prompt"),
        ("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ("/v1/chat/completions", {"model": "m", "messages": "hello"}, "messages"),
        ("/v1/embeddings", {"model": "m"}, "input"),
        ("/v1/embeddings", {"model": "m", "input": "a", "encoding_format": "x"}, "encoding_format"),
        ("/v1/responses", {"model": "m"}, "input"),
        ("/v1/responses", {"model": "m", "input": "a", "conversation": "c"}, "conversation"),
        ("/v1/other", {}, "url"),
    ],
)
async def test_a_wrong_request_is_refused_by_its_field(
    translator: OpenAITranslator, endpoint: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await translator.translate(endpoint, body)
    assert refused.value.field == field


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_of_batches_is_known(
    translator: OpenAITranslator, endpoint: str
) -> None:
    body = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
        "/v1/completions": {"prompt": "hello"},
    }.get(endpoint, {"input": "hello"})
    with pytest.raises(UnknownModel):
        await translator.translate(endpoint, {"model": "absent", **body})
