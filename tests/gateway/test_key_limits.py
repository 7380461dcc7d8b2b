"""What an API key has left, in OpenAI's headers."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import closing
from typing import Any, cast

import httpx2 as httpx
import pytest
from starlette.requests import Request

from gateway.conftest import MODEL, Site
from gateway.locked import LockedGate, locked_gate
from support.shard import KEYS
from support.wait import wait_until
from tidemill._link import Link
from tidemill.access.api_keys import KeyScope
from tidemill.gateway.identity import Identity
from tidemill.gateway.key_limits import KeyAccount, headers_of, span
from tidemill.protocol.calls import NewJob
from tidemill.protocol.calls.access import Charged, KeyLimits
from tidemill.protocol.messages import GenerateRequest, Usage

COMPLETIONS = "/v1/completions"
#: Takes 3 tokens and 4 more.
SHORT: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def gate(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedGate]:
    """A gateway that asks for keys."""
    with locked_gate(site, tmp_path_factory.mktemp("limits")) as gate:
        yield gate


def tokens_left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        *((0, "0ms"), (-1, "0ms"), (0.02, "20ms"), (0.9996, "1s"), (1, "1s")),
        *((8.64, "8.64s"), (60, "1m0s"), (361.5, "6m1.5s"), (59.9999, "1m0s")),
    ],
)
def test_spans_are_written_as_openai_writes_them(seconds: float, told: str) -> None:
    assert span(seconds) == told


def test_headers_tell_only_of_bounds_that_there_are() -> None:
    told = headers_of(KeyLimits(tokens=600), Charged(0, "", None, -60))
    assert told == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m6s",
    }
    assert headers_of(KeyLimits(), Charged(0, "", None, None)) == {}
    nothing = headers_of(KeyLimits(requests=0), Charged(60_000, "requests", 0, None))
    assert nothing["x-ratelimit-reset-requests"] == "1m0s"


async def test_a_job_that_was_cancelled_has_used_its_prompt() -> None:
    charges: list[int] = []

    class Bucket:
        """Stands for the gateway's state: what is taken of the key, and what comes back."""

        async def charge(self, _: Identity, *, requests: int = 0, tokens: int = 0) -> Charged:
            charges.append(tokens)
            return Charged(0, "", None, 1000)

        def spawn(self, chore: Coroutine[Any, Any, None], _: str) -> None:
            tasks.append(asyncio.ensure_future(chore))

    tasks: list[asyncio.Future[None]] = []
    identity = Identity("acme", limits=KeyLimits(tokens=1000))
    account = KeyAccount(cast(Any, Bucket()), identity, Request({"type": "http", "state": {}}))
    request = GenerateRequest(model=MODEL, prompt_ids=(5,) * 300)
    counted, uncounted = (
        NewJob(name, request, cost=cost, num_tokens=500, max_output=200)
        for name, cost in (("a", 300), ("b", 0))
    )
    await account.take_jobs([counted, uncounted])
    account.settle("a", Usage(prompt_tokens=300, completion_tokens=20))
    # Nobody has counted the prompt of this one, so that it may have been computed.
    account.settle("b", Usage(completion_tokens=20))
    await asyncio.gather(*tasks)
    assert charges == [1000, -180, -180]


def test_a_request_takes_prompt_and_longest_answer_and_gets_back_what_it_did_not_use(
    gate: LockedGate,
) -> None:
    _, client = gate.key("acme", tokens_per_minute=1000, requests_per_minute=100)
    first = client.post(COMPLETIONS, json=SHORT)
    assert first.status_code == 200 and first.json()["usage"]["total_tokens"] == 7
    assert tokens_left(first) == 1000 - 7
    assert first.headers["x-ratelimit-limit-requests"] == "100"
    assert first.headers["x-ratelimit-remaining-requests"] == "99"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    long = {**SHORT, "max_tokens": 700, "allowed_token_ids": [9], "stop_token_ids": [9]}
    for stream in (False, True, False):

        def is_accepted(stream: bool = stream) -> bool:
            return client.post(COMPLETIONS, json={**long, "stream": stream}).status_code == 200

        # What is left after the first is not enough for the next, nor what comes with the time.
        wait_until(is_accepted, 8, "what the one before did not use comes back")


def test_who_has_no_tokens_left_is_told_so_as_openai_does(gate: LockedGate) -> None:
    _, client = gate.key("acme", tokens_per_minute=1000)
    job = client.post("/v1/jobs", json={**SHORT, "max_tokens": 900, "delay": 3600})
    assert job.status_code == 202 and tokens_left(job) == 1000 - 903
    refused = client.post(COMPLETIONS, json={**SHORT, "max_tokens": 500})
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "x-ratelimit-reset-tokens" in refused.headers
    assert "x-ratelimit-limit-requests" not in refused.headers
    assert "x-ratelimit-limit-tokens" not in client.get("/v1/models").headers
    client.post(f"/v1/jobs/{job.json()['id']}/cancel")


def test_what_the_queue_refuses_takes_no_tokens(gate: LockedGate, site: Site) -> None:
    _, client = gate.key("full", tokens_per_minute=1000)
    with closing(Link(site.stack.url, "00", 30)) as link:
        link.client.hset(KEYS.settings, "jobs:full", 0)
        assert client.post(COMPLETIONS, json=SHORT).json()["error"]["code"] == "queue_full"
        link.client.hdel(KEYS.settings, "jobs:full")
    wait_until(
        lambda: tokens_left(client.post(COMPLETIONS, json=SHORT)) == 1000 - 7, 10, "it came back"
    )


def test_what_tokenises_counts_as_a_request(gate: LockedGate) -> None:
    _, reader = gate.key("acme", frozenset({KeyScope.READ}), requests_per_minute=4)
    turns = [{"role": "user", "content": "a"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": turns}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ]
    left = []
    for path, body in asked:
        answer = reader.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        left.append(answer.headers["x-ratelimit-remaining-requests"])
    assert left == ["3", "2", "1", "0"]
    refused = reader.post("/tokenize", json={"model": MODEL, "prompt": "a"})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert reader.get("/v1/models").status_code == 200
