"""Jobs of clients that leave end at once, unless somebody may come back for them."""

import threading
from typing import Any

import httpx2 as httpx
import pytest

from gateway.client import ask, post
from gateway.conftest import MODEL, Site
from support.shard import KEYS
from support.wait import wait_until
from tidemill import JobCancelled, Producer
from tidemill.gateway.embedding import kind_options
from tidemill.gateway.openai_models.audio import TranscriptionRequest
from tidemill.gateway.openai_models.embeddings import EmbeddingRequest, KindRequest
from tidemill.gateway.openai_models.scores import RerankRequest
from tidemill.service.redis import connect

PATH = "/v1/completions"
#: Nobody is there.
CALLBACK = "https://hooks.invalid/done"
#: Far more than the model writes in the time that a test takes.
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


def num_alive(producer: Producer) -> int:
    status = producer.status()
    return status.num_queued + status.num_running


def test_the_job_of_a_stream_that_is_closed_is_cancelled(site: Site, producer: Producer) -> None:
    with httpx.stream("POST", f"{site.url}{PATH}", json={**LONG, "stream": True}) as answer:
        job_id = next(answer.iter_lines()).partition("cmpl-")[2].partition('"')[0]
    with pytest.raises(JobCancelled):
        producer.result(job_id, timeout=10)


def test_jobs_of_a_request_that_is_given_up_are_cancelled(site: Site, producer: Producer) -> None:
    wait_until(lambda: num_alive(producer) == 0)
    body = {**LONG, "prompt": ["a", "b", "c"]}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{site.url}{PATH}", json=body, timeout=httpx.Timeout(10, read=0.5))
    wait_until(lambda: num_alive(producer) == 0, 10, "the jobs go on")


def test_a_job_whose_end_is_told_elsewhere_goes_on(site: Site, producer: Producer) -> None:
    body = {**LONG, "max_tokens": 60, "stream": True, "callback_url": CALLBACK}
    with httpx.stream("POST", f"{site.url}{PATH}", json=body) as answer:
        job_id = next(answer.iter_lines()).partition("cmpl-")[2].partition('"')[0]
    assert len(producer.result(job_id, timeout=30).token_ids) == 60


def test_jobs_of_a_refused_request_are_cancelled_whoever_would_be_told(
    site: Site, producer: Producer
) -> None:
    wait_until(lambda: num_alive(producer) == 0)
    body = {**LONG, "prompt": ["a", [10**6]], "callback_url": CALLBACK}
    assert post(site, PATH, body).status_code == 400
    wait_until(lambda: num_alive(producer) == 0, 10, "the other job goes on")


MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "hi", "max_tokens": 1}),
        ("/v1/chat/completions", {**MESSAGES, "max_tokens": 1}),
        ("/v1/messages", {**MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/jobs", {"prompt": "hi", "max_tokens": 1}),
    ],
)
def test_every_endpoint_takes_an_address_that_is_told_of_the_end(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    tenant = f"told{path.replace('/', '.')}"
    asked = {"model": MODEL, "callback_url": CALLBACK, **body}
    answer = post(site, path, asked, **{"X-Tidemill-Tenant": tenant})
    assert answer.status_code in (200, 202), answer.text
    with Producer(site.stack.url, tenant=tenant) as client, connect(site.stack.url) as server:
        [job] = client.jobs()
        assert server.hget(KEYS.job(job.job_id), "wh") == CALLBACK.encode()
    for url in (
        "file:///etc/passwd",
        "http://example.com/",
        "https://[::1]/",
        "https://2130706433/",
    ):
        wrong = post(site, path, {**asked, "callback_url": url})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "callback_url"


@pytest.mark.parametrize(
    "body",
    [
        EmbeddingRequest(input="a", callback_url=CALLBACK, metadata={"a": "b"}),
        RerankRequest(query="a", documents=["b"], callback_url=CALLBACK, metadata={"a": "b"}),
        TranscriptionRequest(callback_url=CALLBACK),
    ],
)
def test_jobs_of_other_kinds_have_an_address_too(body: KindRequest) -> None:
    options = kind_options(body, None)
    assert options["callback_url"] == CALLBACK
    assert options.get("metadata", {"a": "b"}) == {"a": "b"}


def test_a_request_with_a_key_is_found_again(site: Site, producer: Producer) -> None:
    body = {**LONG, "max_tokens": 100, "seed": None}
    headers = {"idempotency-key": "again"}
    with httpx.stream("POST", f"{site.url}{PATH}", json=body, headers=headers):
        pass
    told = post(site, PATH, body, **headers).json()
    again = post(site, PATH, body, **headers).json()
    assert told["id"] == again["id"] and told["choices"] == again["choices"]
    other = post(site, PATH, {**body, "max_tokens": 99}, **headers)
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"


def test_prompts_of_one_request_have_keys_of_their_own(site: Site) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4}
    first = post(site, PATH, body, **{"idempotency-key": "pair"}).json()
    again = post(site, PATH, body, **{"idempotency-key": "pair"}).json()
    assert first["choices"] == again["choices"] and len(first["choices"]) == 2
    for other in ({"prompt": ["a"]}, {"prompt": ["a", "b", "c"]}, {"user": "u"}, {"logprobs": 0}):
        refused = post(site, PATH, {**body, **other}, **{"idempotency-key": "pair"})
        assert refused.status_code == 409, other
    same = {"max_tokens": 4, "prompt": ["a", "b"], "model": MODEL}
    assert post(site, PATH, same, **{"idempotency-key": "pair"}).json()["id"] == first["id"]


def test_a_job_cancelled_by_somebody_else_ends_its_stream_with_an_error(
    site: Site, producer: Producer
) -> None:
    with httpx.stream("POST", f"{site.url}{PATH}", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        job_id = next(lines).partition("cmpl-")[2].partition('"')[0]
        threading.Thread(target=producer.cancel, args=(job_id,)).start()
        *_, error, done = [line for line in lines if line]
    assert '"job_cancelled"' in error and done == "data: [DONE]"


def test_a_deadline_that_passes_is_told_as_such(site: Site) -> None:
    answer = post(site, PATH, {**LONG, "deadline": 0.2})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline"
    assert answer.headers["x-should-retry"] == "false"


def test_metadata_comes_back(site: Site) -> None:
    messages = [{"role": "user", "content": "x"}]
    told = ask(site, "/v1/chat/completions", messages=messages, max_tokens=1, metadata={"a": "b"})
    assert told["metadata"] == {"a": "b"}
