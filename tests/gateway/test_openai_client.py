"""What users of OpenAI's client meet beside answers: errors, retries, pages, headers."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import httpx2 as httpx
import pytest
from openai.types import Batch

import openai
from gateway.conftest import MODEL, Site
from support.shard import KEYS
from support.wait import wait_until
from tidemill import Producer
from tidemill._link import Link
from tidemill.protocol.settings import Setting
from tidemill.tenant_limits import LimitSettings

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
ENDLESS: dict[str, Any] = {"model": MODEL, "messages": HELLO, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_errors_are_the_clients_own_with_field_code_and_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**ASK, temperature=9)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")
    assert wrong.value.type == "invalid_request_error" and "temperature" in wrong.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 4000}]
        )
    assert long.value.code == "context_length_exceeded"
    for ask in (client.files.retrieve, client.batches.retrieve, client.responses.retrieve):
        with pytest.raises(openai.NotFoundError) as missing:
            ask("none")
        assert missing.value.code == "not_found" and "'none'" in missing.value.message


def test_what_this_server_does_not_offer_is_refused_by_method_and_path(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/moderations") as missing:
        client.moderations.create(input="x")
    assert missing.value.code == "not_found"
    with pytest.raises(openai.APIStatusError, match="DELETE /v1/models/tiny") as unsuited:
        client.models.delete(MODEL)
    assert (unsuited.value.status_code, unsuited.value.code) == (405, "method_not_allowed")


def test_the_client_waits_as_long_as_it_is_told_and_is_let_in_then(site: Site) -> None:
    name, limits = "hasty", {Setting.TOKENS_PER_MINUTE: 600}
    with closing(Link(site.stack.url, KEYS.shard, 10.0)) as link:
        LimitSettings(link, KEYS).set(name, limits)
    with Producer(site.stack.url, tenant=name, timeout=30) as producer:
        # Ten tokens a second; this takes all that there are.
        waiting = producer.submit("x", max_tokens=600, delay=600)
        client = openai.OpenAI(
            base_url=f"{site.url}/v1",
            api_key="none",
            default_headers={"X-Tidemill-Tenant": name},
            max_retries=0,
        )
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ASK)
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) > 1
        patient = client.with_options(max_retries=2)
        told = patient.chat.completions.with_raw_response.create(**ASK)
        # Its own first pause is half a second: too short by far.
        assert told.retries_taken == 1 and told.parse().choices
        waiting.cancel()


def test_a_client_that_is_out_of_patience_leaves_nothing_running(
    site: Site, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**ENDLESS)
    wait_until(lambda: httpx.get(f"{site.url}/load").json() == {"server_load": 0}, timeout=30)


def test_an_impatient_client_with_an_idempotency_key_comes_back_for_its_answer(
    client: openai.OpenAI,
) -> None:
    # No try is long enough for all of it, so each goes on with the job of the first.
    told = client.with_options(timeout=0.5, max_retries=20).chat.completions.with_raw_response
    answer = told.create(**ENDLESS, max_tokens=600, extra_headers={"Idempotency-Key": "impatient"})
    assert answer.retries_taken >= 1
    usage = answer.parse().usage
    assert usage is not None and usage.completion_tokens == 600


def test_raw_answers_have_their_headers_and_the_requests_own_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **ASK, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["content-type"] == "application/json" and raw.request_id == "mine"
    assert raw.parse()._request_id == "mine"
    with client.chat.completions.with_streaming_response.create(**ASK, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_the_tokens_of_a_response_are_counted_before_it_is_made(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "instructions": "Be brief."}
    first = client.responses.create(**asked, max_output_tokens=4)
    counted = client.responses.input_tokens.count(**asked)
    assert first.usage is not None and counted.input_tokens == first.usage.input_tokens
    follow_up: dict[str, Any] = {"model": MODEL, "input": "more", "previous_response_id": first.id}
    second = client.responses.create(**follow_up, max_output_tokens=4)
    counted = client.responses.input_tokens.count(**follow_up)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens
    assert counted.input_tokens > first.usage.input_tokens


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed[MODEL] == client.models.retrieve(MODEL)
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("org/none")
    assert missing.value.code == "model_not_found"


def batch_file(client: openai.OpenAI, *bodies: Any) -> str:
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}
        for number, body in enumerate(bodies)
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def test_pages_of_files_are_followed_to_the_last_in_either_order(client: openai.OpenAI) -> None:
    made = [
        client.files.create(file=("a.txt", str(n).encode()), purpose="evals").id for n in range(5)
    ]
    for order, wanted in (("asc", made), ("desc", made[::-1])):
        listed: Any = client.files.list(purpose="evals", limit=2, order=order)  # type: ignore[arg-type]
        assert [file.id for file in listed] == wanted
    page = client.files.list(purpose="evals", limit=2)
    assert [file.id for file in page.data] == made[:2:-1] and page.has_next_page()
    # What a page ended with may have been deleted before the next is asked for.
    client.files.delete(page.data[-1].id)
    assert [file.id for file in page.get_next_page().data] == made[1:3][::-1]
    for file in client.files.list(purpose="evals", limit=1):
        assert client.files.wait_for_processing(file.id, poll_interval=0.01).status == "processed"
        client.files.delete(file.id)
    assert list(client.files.list(purpose="evals")) == []


def test_a_batch_is_waited_for_read_and_found_among_the_pages(client: openai.OpenAI) -> None:
    file = batch_file(client, ASK, {**ASK, "messages": []})
    made = [
        client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        for _ in range(2)
    ]

    def ended() -> Batch | None:
        told = client.batches.retrieve(made[-1].id)
        return told if told.status in ("completed", "failed") else None

    batch = wait_until(ended, timeout=60)
    assert batch is not None and batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert batch.output_file_id is not None and batch.error_file_id is not None
    [line] = client.files.content(batch.output_file_id).iter_lines()
    assert json.loads(line)["response"]["body"]["object"] == "chat.completion"
    wrong = json.loads(client.files.content(batch.error_file_id).text)
    assert wrong["custom_id"] == "id-1" and wrong["response"]["status_code"] == 400
    listed = [each.id for each in client.batches.list(limit=1)]
    assert listed[:2] == [each.id for each in reversed(made)]
