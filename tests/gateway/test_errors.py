"""Errors have OpenAI's body, a fitting status and, where it helps, a time to try again."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.client import post
from gateway.conftest import Site
from tidemill.gateway.body_limit import BodyLimit
from tidemill.gateway.errors import MAX_RETRY_AFTER_SECONDS, api_error, handle_error
from tidemill.gateway.identity import AnyCaller, Authentication, Authenticator, FixedKeys
from tidemill.gateway.request_ids import RequestIds
from tidemill.protocol.errors import (
    BrokerUnavailable,
    Forbidden,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFound,
    QueueFull,
    RateLimited,
    UnknownModel,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "x"}]

#: What no grammar can be made of.
UNKNOWN_TYPE: dict[str, Any] = {"type": "objec"}
WRONG_FORMAT = {"type": "json_schema", "name": "a", "schema": UNKNOWN_TYPE}
WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNKNOWN_TYPE}}
TAGS = {"type": "structural_tag", "structures": [], "triggers": []}
LAMP = {"type": "function", "function": {"name": "lamp", "parameters": UNKNOWN_TYPE}}

#: Error, status, code, whether OpenAI's clients may try again by themselves.
TOLD: list[tuple[Exception, int, str, bool]] = [
    (InvalidRequest("a: b", field="a"), 400, "invalid_value", False),
    (UnknownModel("m", field="model"), 404, "model_not_found", False),
    (IdempotencyConflict("k", field="idempotency_key"), 409, "idempotency_conflict", False),
    (Forbidden("no"), 403, "insufficient_permissions", False),
    (QueueFull("full", retry_after_seconds=3.2), 429, "queue_full", True),
    (RateLimited("slow", retry_after_seconds=0.1), 429, "rate_limit_exceeded", True),
    (BrokerUnavailable("away"), 503, "unavailable", True),
    (JobNotFound("gone", job_id="j"), 404, "not_found", False),
    (JobCancelled("off", job_id="j"), 409, "job_cancelled", False),
    (JobFailed("bad", job_id="j", state="failed"), 400, "job_failed", False),
    (JobFailed("dead", job_id="j", state="dead"), 500, "job_failed", False),
    (
        JobFailed("late", job_id="j", state="expired", finish_reason="queue_timeout"),
        504,
        "queue_timeout",
        False,
    ),
    (RuntimeError("a secret"), 500, "internal_error", False),
    (OSError(24, "no more files"), 500, "internal_error", True),
]


@pytest.mark.parametrize(("error", "status", "code", "is_retried"), TOLD)
def test_each_error_has_a_status_and_a_code(
    error: Exception, status: int, code: str, is_retried: bool
) -> None:
    told = api_error(error)
    assert (told.status, told.code) == (status, code)
    detail = json.loads(told.encoded())["error"]
    assert set(detail) == {"message", "type", "param", "code"} and detail["message"]
    # The client tries again after these statuses, unless it is told not to.
    by_status = status in (408, 409, 429) or status >= 500
    assert (by_status and told.headers.get("x-should-retry") != "false") == is_retried


def test_nobody_is_told_to_wait_longer_than_clients_do() -> None:
    def wait(seconds: float) -> int:
        told = api_error(QueueFull("full", retry_after_seconds=seconds))
        return int(told.headers["retry-after"])

    assert [wait(seconds) for seconds in (0.0, 1.2, 119.5, 10**6, float("inf"))] == [
        *(1, 2, 120),
        *(MAX_RETRY_AFTER_SECONDS, MAX_RETRY_AFTER_SECONDS),
    ]


def test_what_is_not_ours_is_not_told() -> None:
    assert b"secret" not in api_error(RuntimeError("a secret")).encoded()


def test_a_message_may_quote_half_of_a_surrogate_pair() -> None:
    told = api_error(InvalidRequest("a: '\ud800'", field="a")).encoded()
    assert json.loads(told)["error"]["message"] == "a: '\ud800'"


NO_TOKENS = {"max_completion_tokens": 0}
BAD: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "temperature": 3}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "warm"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 9}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}, 400, "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "s" * 200}, 400, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "metadata": {"a": 1}}, 400, "metadata"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "model": "nobody"}, 404, "model"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, 400, "tools.0.function"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "functions": [{}]}, 400, "functions"),
    (CHAT, {"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 2, **NO_TOKENS}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "poem"}}, 400, "response_format.type"),
    (CHAT, {"messages": HELLO, "response_format": WRONG_SCHEMA}, 400, "response_format"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
    (CHAT, {"messages": HELLO, "tools": [LAMP], "tool_choice": "required"}, 400, "tools"),
    ("/v1/responses", {"input": "x", "text": {"format": WRONG_FORMAT}}, 400, "text.format"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
    (CHAT, {"messages": [{"role": "zzz", "content": "x"}]}, 400, "messages.0.role"),
    (
        CHAT,
        {"messages": [*HELLO, {"role": "tool", "content": "x"}]},
        400,
        "messages.1.tool_call_id",
    ),
    (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
    ("/v1/responses", {"input": "x", "min_tokens": 9, "max_output_tokens": 4}, 400, "min_tokens"),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
    (COMPLETIONS, {"prompt": "x", "prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
    (COMPLETIONS, {"prompt": "x", "logits_processors": ["a.b"]}, 400, "logits_processors"),
    (CHAT, {"messages": HELLO, "logits_processors": ["a.b"]}, 400, "logits_processors"),
    ("/v1/jobs", {"prompt": "x", "prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
    (CHAT, {"messages": HELLO, "response_format": TAGS}, 400, "response_format.type"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": TAGS}, 400, "structured_outputs"),
    (CHAT, {"messages": HELLO, "thinking_token_budget": 5}, 400, "thinking_token_budget"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_interval": 0}, 400, "stream_interval"),
    (CHAT, {"messages": HELLO, "echo": True}, 400, "echo"),
    ("/v1/embeddings", {"input": "x", "embed_dtype": "float16"}, 400, "embed_dtype"),
    ("/v1/embeddings", {"input": "x", "endianness": "big"}, 400, "endianness"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_a_bad_field_is_refused_by_name(
    site: Site, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = post(site, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or (error["param"].startswith(param) and param in error["message"])


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"", "invalid_value", "body"),
        (b"{", "invalid_json", "the body is not JSON"),
        (b"[1]", "invalid_value", "body"),
        (b'"x"', "invalid_value", "body"),
        (b"\xff", "invalid_json", "not UTF-8"),
        (b"[" * 10_000, "invalid_json", "it nests too deep"),
        (b'{"x": %s}' % (b"9" * 5000), "invalid_json", "thousands of digits"),
        (b"[" * 100_000, "invalid_json", "depth limit exceeded: line 1 column"),
    ],
)
def test_a_body_that_is_no_object_is_refused(
    site: Site, body: bytes, code: str, words: str
) -> None:
    answer = httpx.post(
        f"{site.url}{CHAT}", content=body, headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == code and words in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": "\\ud800", "add_special_tokens": false}'),
        (COMPLETIONS, b'{"prompt": "x", "model": "\\ud800"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"\\ud800": "x"}}'),
        ("/tokenize", b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": "x", "seed": 1%s}' % (b"0" * 5000)),
        (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'),
    ],
)
def test_texts_and_numbers_that_are_none_are_refused(site: Site, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{site.url}{path}", content=body, headers=headers)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def chain(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


SCHEMA = {"type": "object", "properties": {"a": {"maximum": 2**64}}}
FUNCTION = {"type": "function", "name": "f"}

#: Path, body, the place of what nothing can hold in it.
UNHELD: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("/v1/responses", {"input": "x", **body}, param)
        for value in ("\ud800", 2**64, chain(300))
        for body, param in (
            ({"user": value}, "user"),
            ({"safety_identifier": value}, "safety_identifier"),
            ({"reasoning": {"effort": value}}, "reasoning.effort"),
            ({"reasoning": {"x": value}}, "reasoning.x"),
            ({"text": {"x": value}}, "text.x"),
            ({"tools": [{**FUNCTION, "description": value}]}, "tools.0.description"),
            ({"unknown": value}, "unknown"),
        )
    ),
    (
        "/v1/responses",
        {"input": "x", "tools": [{**FUNCTION, "parameters": SCHEMA}]},
        "tools.0.parameters.properties.a.maximum",
    ),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        "text.format.schema.properties.a.maximum",
    ),
    ("/v1/responses", {"input": "x", "instructions": "\ud800"}, "instructions"),
    (CHAT, {"messages": HELLO, "prompt_cache_key": "\ud800"}, "prompt_cache_key"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "\ud800"}]}, "messages.0.name"),
    (CHAT, {"messages": HELLO, "seed": 10**30}, "seed"),
    (COMPLETIONS, {"prompt": ["x", "\ud800"]}, "prompt.1"),
    (COMPLETIONS, {"prompt": [1, -(2**63) - 1]}, "prompt.1"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "system": "\ud800"}, "system"),
    ("/v1/jobs", {"prompt": "x", "metadata": {"a": "\ud800"}}, "metadata.a"),
    ("/v1/batches", {"input_file_id": "\ud800", "endpoint": COMPLETIONS}, "input_file_id"),
    ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 2**64}}, "chat_template_kwargs.a"),
]


@pytest.mark.parametrize(("path", "body", "param"), UNHELD)
def test_a_value_that_nothing_can_hold_is_refused_by_its_place(
    site: Site, path: str, body: Any, param: str
) -> None:
    data = json.dumps(body).encode()
    answer = httpx.post(
        f"{site.url}{path}", content=data, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid_value" and error["type"] == "invalid_request_error"
    # Of what nests too deep the place has as many names as are of use.
    assert error["param"] == param or error["param"].startswith(f"{param}.0.0"), error
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("path", ["/v1/responses", CHAT])
def test_numbers_of_64_bits_and_nesting_of_200_levels_are_taken(site: Site, path: str) -> None:
    said = {"input": "x"} if path == "/v1/responses" else {"messages": HELLO}
    odd = [2**64 - 1, -(2**63), chain(197)]
    assert post(site, path, {**said, "unknown": odd}).status_code == 200


@pytest.mark.parametrize("given", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("path", [CHAT, "/v1/jobs", "/v1/batches"])
def test_a_body_that_is_not_declared_to_be_json_is_refused(
    site: Site, path: str, given: str | None
) -> None:
    headers = {} if given is None else {"content-type": given}
    answer = httpx.post(f"{site.url}{path}", content=b'{"prompt": "x"}', headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 415 and error["code"] == "unsupported_media_type"
    assert "application/json" in error["message"] and (given or "is missing") in error["message"]


@pytest.mark.parametrize("given", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_declared_in_any_way(site: Site, given: str) -> None:
    headers = {"content-type": given}
    answer = httpx.post(f"{site.url}/tokenize", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/jobs"])
def test_lists_behind_what_is_no_id_are_refused_alike(site: Site, path: str) -> None:
    answer = httpx.get(f"{site.url}{path}?after=zz")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "after"


def test_paths_and_methods_that_are_not_there_are_told_so_too(site: Site) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("PUT", CHAT, 405)):
        answer = httpx.request(method, f"{site.url}{path}")
        assert answer.status_code == status and answer.json()["error"]["type"]


async def echo(request: Request) -> PlainTextResponse:
    body = await request.body()
    tenant = request.state.identity.tenant
    return PlainTextResponse(f"{tenant} {len(body)}")


def surrounded(authenticator: Authenticator) -> httpx.AsyncClient:
    """Return a client of an application behind the gateway's middleware."""
    app = Starlette(routes=[Route("/v1/echo", echo, methods=["POST"])])
    app.add_exception_handler(Exception, handle_error)
    app.add_middleware(BodyLimit, num_bytes=100, bounds={"/v1/files": 1000}, silence_seconds=0.1)
    app.add_middleware(Authentication, authenticator=authenticator)
    app.add_middleware(RequestIds)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


Post = Callable[..., Awaitable[httpx.Response]]


async def test_a_long_body_is_refused_before_it_has_come() -> None:
    async with surrounded(AnyCaller()) as client:
        assert (await client.post("/v1/echo", content=b"x" * 100)).text == "default 100"
        announced = await client.post("/v1/echo", content=b"x" * 101)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 50

        in_pieces = await client.post("/v1/echo", content=pieces())
    assert announced.status_code == in_pieces.status_code == 413
    assert announced.json()["error"]["code"] == "request_too_large"


async def test_keys_are_asked_for_and_compared() -> None:
    async with surrounded(FixedKeys(["one", "two"])) as client:
        statuses = [
            (await client.post("/v1/echo", headers=headers)).status_code
            for headers in (
                {},
                {"authorization": "Bearer "},
                {"authorization": "Bearer three"},
                {"authorization": "Basic two"},
                {"authorization": "Bearer two"},
                {"authorization": "bearer one"},
                {"x-api-key": "one"},
            )
        ]
        refused = await client.post("/v1/echo", headers={"authorization": "Bearer three"})
    assert statuses == [401, 401, 401, 401, 200, 200, 200]
    assert refused.headers["www-authenticate"] == "Bearer" and "three" not in refused.text


async def test_the_tenant_header_counts_only_where_nobody_needs_a_key() -> None:
    named = {"x-tidemill-tenant": "acme", "authorization": "Bearer one"}
    async with surrounded(AnyCaller()) as client:
        assert (await client.post("/v1/echo", headers=named)).text == "acme 0"
        odd = await client.post("/v1/echo", headers={"x-tidemill-tenant": "a b"})
        assert odd.status_code == 400 and odd.json()["error"]["param"] == "tenant"
    async with surrounded(FixedKeys(["one"])) as client:
        assert (await client.post("/v1/echo", headers=named)).text == "default 0"


async def test_each_answer_has_the_id_of_its_request() -> None:
    async with surrounded(FixedKeys(["one"])) as client:
        own = await client.post("/v1/echo", headers={"x-request-id": "mine-1"})
        made = [await client.post("/v1/echo") for _ in range(2)]
        odd = await client.post("/v1/echo", headers={"x-request-id": "a b"})
    assert own.headers["x-request-id"] == "mine-1"
    assert made[0].headers["x-request-id"] != made[1].headers["x-request-id"]
    assert odd.headers["x-request-id"].startswith("req_")
