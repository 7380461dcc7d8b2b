"""Responses as OpenAI's own client asks for them: streamed, left, resumed and gone on with."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

import openai
from gateway.client import post
from gateway.conftest import MODEL, Site
from gateway.document import check
from support.shard import KEYS
from support.wait import wait_until
from tidemill import Producer
from tidemill._link import Link
from tidemill.gateway.app import create_app
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.state import GatewayState
from tidemill.responses.store import LIFE_AFTER_END_SECONDS
from tidemill.service.redis import connect

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
ENDLESS: dict[str, Any] = {"model": MODEL, "extra_body": {"ignore_eos": True}}
LAMP: Any = {
    "type": "function",
    "name": "lamp",
    "description": "Switches the lamp",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
    "strict": True,
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Lamp(BaseModel):
    """What an answer is parsed as."""

    on: bool


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def plain(response: Response) -> dict[str, Any]:
    return response.model_dump(mode="json", exclude={"created_at"})


def life_of(site: Site, made: Response) -> int:
    """Seconds for which what is kept of a response stays."""
    with closing(Link(site.stack.url, "00", 30)) as link:
        key = KEYS.response("default", made.id.removeprefix("resp_"))
        return int(link.client.ttl(key))


def valid(events: Any) -> list[Any]:
    """The events of a stream, each of which is what OpenAI's description says."""
    found = list(events)
    for event in found:
        EVENT.validate_python(event.to_dict())
    return found


def test_a_response_is_the_chat_of_the_same_conversation(site: Site, client: openai.OpenAI) -> None:
    told = client.responses.create(
        input="hello", instructions="Be brief.", metadata={"a": "b"}, **GREEDY
    )
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ],
        max_tokens=12,
        temperature=0,
    )
    assert told.output_text == chat.choices[0].message.content
    assert told.id.startswith("resp_job_") and told.metadata == {"a": "b"}
    assert told.status == "incomplete" and told.incomplete_details is not None
    assert told.incomplete_details.reason == "max_output_tokens"
    assert told.usage is not None and chat.usage is not None
    assert told.usage.input_tokens == chat.usage.prompt_tokens
    assert told.usage.output_tokens == 12
    again = client.responses.retrieve(told.id)
    assert again == told
    raw = httpx.get(f"{site.url}{PATH}/{told.id}").json()
    check(site.url, f"{PATH}/{{response_id}}", raw, method="get")
    check(site.url, PATH, raw)
    Response.model_validate(raw)


def test_a_stream_has_the_events_in_their_order_and_ends_with_what_is_kept(
    client: openai.OpenAI,
) -> None:
    events = valid(client.responses.create(input="hello", stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    last = events[-1].response
    assert deltas and "".join(event.delta for event in deltas) == last.output_text
    assert client.responses.retrieve(last.id) == last
    whole = client.responses.create(input="hello", **GREEDY)
    assert whole.output_text == last.output_text
    with client.responses.stream(input="hello", **GREEDY) as stream:
        for _ in stream:
            continue


def test_any_number_of_a_stream_is_gone_on_behind_also_when_the_token_log_is_gone(
    site: Site, client: openai.OpenAI
) -> None:
    options: dict[str, Any] = GREEDY | {"max_output_tokens": 60, "top_logprobs": 1}
    events = valid(client.responses.create(input="hello", stream=True, **options))
    made = events[-1].response
    places = (0, 4, len(events) // 2, len(events) - 2, len(events))

    def resumed() -> list[list[Any]]:
        return [
            valid(client.responses.retrieve(made.id, stream=True, starting_after=place))
            for place in places
        ]

    wanted = [events[place + 1 :] for place in places]
    assert resumed() == wanted
    job_id = made.id.removeprefix("resp_")
    with connect(site.stack.url) as redis:
        assert redis.delete(KEYS.token_log(job_id)) == 1
    assert resumed() == wanted
    assert client.responses.retrieve(made.id) == made


def test_an_answer_of_a_schema_is_parsed(client: openai.OpenAI) -> None:
    told = client.responses.parse(model=MODEL, input="hello", text_format=Lamp, temperature=1)
    assert isinstance(told.output_parsed, Lamp) and told.status == "completed"
    assert told.text is not None and told.text.format is not None
    assert told.text.format.type == "json_schema"
    with client.responses.stream(model=MODEL, input="hello", text_format=Lamp) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Lamp)


def test_a_call_is_made_and_its_output_gone_on_with(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [LAMP], "parallel_tool_calls": False}
    events = valid(
        client.responses.create(input="hello", tool_choice="required", stream=True, **options)
    )
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    made = events[-1].response
    [call] = made.output
    assert call.type == "function_call" and call.name == "lamp" and call.status == "completed"
    Lamp.model_validate_json(call.arguments)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "lit"}
    after = client.responses.create(
        input=[output], previous_response_id=made.id, tool_choice="none", **GREEDY
    )
    by_hand = client.responses.create(
        input=[{"role": "user", "content": "hello"}, call.to_dict(), output],
        tool_choice="none",
        store=False,
        **GREEDY,
    )
    assert after.output_text == by_hand.output_text
    assert after.usage is not None and by_hand.usage is not None
    assert after.usage.input_tokens == by_hand.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(by_hand.id)
    items = list(client.responses.input_items.list(after.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert items[1].id == call.id and len({item.id for item in items}) == 3
    backwards = list(client.responses.input_items.list(after.id))
    assert [item.id for item in backwards] == [item.id for item in reversed(items)]


def test_what_runs_in_the_background_is_found_by_the_id_of_its_job_too(
    client: openai.OpenAI, producer: Producer
) -> None:
    made = client.responses.create(input="hello", background=True, **GREEDY)
    assert made.status in ("queued", "in_progress", "incomplete") and made.background
    job_id = made.id.removeprefix("resp_")
    text = producer.result(job_id).text
    told = client.responses.retrieve(job_id)
    assert told.id == made.id and told.status == "incomplete" and told.output_text == text
    assert client.responses.cancel(made.id) == told
    events = valid(client.responses.retrieve(made.id, stream=True))
    kinds = [event.type for event in events[:3]]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].response == told


def test_what_has_ended_when_it_is_asked_for_in_the_background_is_told_at_once(
    client: openai.OpenAI, producer: Producer
) -> None:
    headers = {"Idempotency-Key": "background-twice"}
    asked = {**GREEDY, "input": "hello", "background": True, "extra_headers": headers}
    first = client.responses.create(**asked)
    text = producer.result(first.id.removeprefix("resp_")).text
    again = client.responses.create(**asked)
    assert (again.id, again.status, again.output_text) == (first.id, "incomplete", text)
    assert again.usage is not None and again.usage.output_tokens == 12


def test_a_background_stream_is_left_resumed_and_cancelled(
    site: Site, client: openai.OpenAI, producer: Producer
) -> None:
    seen = []
    with client.responses.create(input="hello", background=True, stream=True, **ENDLESS) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 8:
                break
    made = seen[0].response
    assert client.responses.retrieve(made.id).status == "in_progress"
    resumed = client.responses.retrieve(made.id, stream=True, starting_after=4)
    first = next(iter(resumed))
    assert first == seen[5]
    told = client.responses.cancel(made.id)
    assert told.status == "cancelled" and told.output_text
    rest = list(resumed)
    assert rest[-1].type == "response.incomplete" and rest[-1].response == told
    assert producer.job_status(made.id.removeprefix("resp_")).state == "cancelled"


def test_a_client_that_leaves_a_stream_ends_its_job(
    site: Site, client: openai.OpenAI, producer: Producer
) -> None:
    with client.responses.create(input="hello", stream=True, **ENDLESS) as stream:
        made = next(iter(stream)).response
    job_id = made.id.removeprefix("resp_")
    wait_until(lambda: producer.job_status(job_id).state == "cancelled")
    wait_until(lambda: 0 < life_of(site, made) <= LIFE_AFTER_END_SECONDS)


@pytest.mark.parametrize("stream", [False, True])
def test_the_record_of_a_response_that_was_told_goes_with_its_job(
    site: Site, client: openai.OpenAI, stream: bool
) -> None:
    told: Any = client.responses.create(input="hello", stream=stream, **GREEDY)
    made = list(told)[-1].response if stream else told
    wait_until(lambda: 0 < life_of(site, made) <= LIFE_AFTER_END_SECONDS)


def test_a_deleted_response_is_gone_and_its_job_ends(
    client: openai.OpenAI, producer: Producer
) -> None:
    made = client.responses.create(input="hello", background=True, **ENDLESS)
    client.responses.delete(made.id)
    assert producer.job_status(made.id.removeprefix("resp_")).state == "cancelled"
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_logprobs_are_told_with_the_text_and_again(client: openai.OpenAI) -> None:
    told = client.responses.create(
        input="hello", include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY
    )
    [message] = told.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert [len(each.top_logprobs) for each in logprobs] == [2] * 12
    joined = b"".join(bytes(each.bytes) for each in logprobs)
    assert joined.decode("utf-8", "replace") == told.output_text
    assert client.responses.retrieve(told.id) == told


def test_the_oldest_items_are_left_out_if_the_request_says_so(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": f"{place} " * 400} for place in range(6)]
    last: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.create(input=long + last, **GREEDY)
    told = client.responses.create(input=long + last, truncation="auto", **GREEDY)
    # Each has 800 tokens and more, of a context of 2048.
    same = client.responses.create(input=long[-2:] + last, **GREEDY)
    assert told.output_text == same.output_text and told.truncation == "auto"
    assert told.usage is not None and same.usage is not None
    assert told.usage.input_tokens == same.usage.input_tokens
    assert len(list(client.responses.input_items.list(told.id))) == 7


async def test_any_gateway_tells_a_response_again(site: Site, client: openai.OpenAI) -> None:
    made = client.responses.create(input="hello", **GREEDY)
    app = create_app(GatewayState(GatewaySettings(redis_url=site.stack.url)))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://other") as other,
    ):
        told = await other.get(f"{PATH}/{made.id}")
    assert Response.model_validate(told.json()) == made


def test_a_key_finds_the_response_again(client: openai.OpenAI) -> None:
    key = {"Idempotency-Key": "response-1"}
    first = client.responses.create(input="hello", extra_headers=key, **GREEDY)
    second = client.responses.create(input="hello", extra_headers=key, **GREEDY)
    assert first == second
    with pytest.raises(openai.ConflictError):
        client.responses.create(input="hello", store=False, extra_headers=key, **GREEDY)


def test_a_response_that_there_is_no_room_to_keep_is_refused(site: Site) -> None:
    tenant, body = {"X-Tidemill-Tenant": "full"}, {"input": "hello", "max_output_tokens": 1}
    with closing(Link(site.stack.url, "00", 30)) as link:
        link.client.hset(KEYS.settings, "response_bytes:full", 9)
        refused = post(site, PATH, body, **tenant)
        assert refused.status_code == 429 and "retry-after" in refused.headers
        error = refused.json()["error"]
        assert error["code"] == "queue_full" and "the limit is 9." in error["message"]
        assert post(site, PATH, {**body, "store": False}, **tenant).status_code == 200
        link.client.hdel(KEYS.settings, "response_bytes:full")
    assert post(site, PATH, body, **tenant).status_code == 200


def test_responses_of_others_are_not_found(site: Site) -> None:
    alice = {"X-Tidemill-Tenant": "alice"}
    made = post(site, PATH, {"input": "hello", "max_output_tokens": 1}, **alice).json()
    for path in (made["id"], f"{made['id']}/input_items", f"{made['id']}?stream=true"):
        other = httpx.get(f"{site.url}{PATH}/{path}", headers={"X-Tidemill-Tenant": "bob"})
        assert other.status_code == 404 and other.json()["error"]["code"] == "not_found"
        assert httpx.get(f"{site.url}{PATH}/{path}", headers=alice).status_code == 200
    after = {"input": "hello", "previous_response_id": made["id"]}
    assert post(site, PATH, after, **{"X-Tidemill-Tenant": "bob"}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": "hello " * 3000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 10**6}, "top_logprobs"),
        ({"truncation": "auto", "input": "hello " * 3000}, "input"),
        ({"truncation": "some"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "input": "hello", **fields}
    answer = post(site, PATH, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
