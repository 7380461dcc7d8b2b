"""Jobs of clients that leave end at once, unless somebody may come back for them."""

import threading

import httpx2 as httpx
import pytest

from gateway.client import ask, post
from gateway.conftest import MODEL, Site
from support.wait import wait_until
from tidemill import JobCancelled, Producer

PATH = "/v1/completions"
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
