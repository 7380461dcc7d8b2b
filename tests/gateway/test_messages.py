"""Messages as Anthropic's clients ask for them: the chats of the same conversations."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from gateway.client import ask, post
from gateway.conftest import MODEL, Site
from gateway.document import check
from support.wait import wait_until

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
LAMP = {
    "name": "lamp",
    "description": "Switches the lamp",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


def events(site: Site, **body: Any) -> list[dict[str, Any]]:
    everything = {"model": MODEL, "stream": True, **body}
    with httpx.stream("POST", f"{site.url}{PATH}", json=everything, timeout=60) as answer:
        assert answer.status_code == 200
        text = "".join(answer.iter_text())
    found = []
    for block in text.strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def rebuilt(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream describe, as clients put it together."""
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
    message: dict[str, Any] = told[0]["message"]
    for event in told[1:-1]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            for kind in ("text", "thinking"):
                block |= {kind: block[kind] + delta[kind]} if kind in delta else {}
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return message


def test_a_message_is_the_chat_of_the_same_conversation(site: Site) -> None:
    told = ask(site, PATH, messages=HELLO, system="Be brief.", **GREEDY)
    check(site.url, PATH, told)
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    true = ask(site, "/v1/chat/completions", messages=chat, **GREEDY)
    [choice] = true["choices"]
    assert told["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", MODEL)
    assert told["stop_reason"] == "max_tokens" and told["stop_sequence"] is None
    usage = told["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == true["usage"]["prompt_tokens"] and usage["output_tokens"] == 12
    counted = ask(site, f"{PATH}/count_tokens", messages=HELLO, system="Be brief.")
    assert counted == {"input_tokens": prompt}


def test_a_stream_makes_the_same_message_block_by_block(site: Site) -> None:
    whole = ask(site, PATH, messages=HELLO, **GREEDY)
    message = rebuilt(events(site, messages=HELLO, **GREEDY))
    assert message["content"] == whole["content"]
    assert message["stop_reason"] == whole["stop_reason"]
    assert message["usage"]["output_tokens"] == 12
    assert message["id"] != whole["id"] and message["id"].startswith("msg_")


def test_a_stop_sequence_is_told(site: Site) -> None:
    whole = ask(site, PATH, messages=HELLO, **GREEDY)["content"][0]["text"]
    stop = whole[3:5]
    told = ask(site, PATH, messages=HELLO, stop_sequences=[stop, "never"], **GREEDY)
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert told["content"] == [{"type": "text", "text": whole[: whole.index(stop)]}]
    streamed = rebuilt(events(site, messages=HELLO, stop_sequences=[stop], **GREEDY))
    assert (streamed["content"], streamed["stop_sequence"]) == (told["content"], stop)


def test_an_answer_that_was_begun_is_gone_on_with(site: Site) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "hi th"}]
    told = ask(site, PATH, messages=begun, **GREEDY)
    true = ask(
        site,
        "/v1/chat/completions",
        messages=begun,
        continue_final_message=True,
        add_generation_prompt=False,
        **GREEDY,
    )
    assert told["content"][0]["text"] == true["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "lamp"}])
def test_a_tool_is_used_whole_and_streamed(site: Site, choice: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "messages": HELLO,
        "tools": [LAMP],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 300,
        # Ends soon: the model is a random one.
        "seed": 4,
    }
    told = ask(site, PATH, **body)
    assert told["stop_reason"] == "tool_use"
    [use] = told["content"]
    assert (use["type"], use["name"]) == ("tool_use", "lamp") and use["id"].startswith("toolu_")
    assert isinstance(use["input"]["on"], bool)
    [streamed] = rebuilt(events(site, **body))["content"]
    assert {**streamed, "id": ""} == {**use, "id": ""}
    # The conversation goes on with the tool's answer.
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "done"}
    more = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert ask(site, PATH, messages=more, tools=[LAMP], **GREEDY)["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "hello " * 3000}]}, "messages"),
    ],
)
def test_a_wrong_message_is_refused_by_its_field(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields}
    answer = post(site, PATH, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_an_error_within_a_stream_is_an_event_of_its_own(site: Site) -> None:
    told = events(
        site, messages=HELLO, max_tokens=1500, deadline=0.3, temperature=0, ignore_eos=True
    )
    assert told[0]["type"] == "message_start"
    assert told[-1] == {"type": "error", "error": told[-1]["error"]}
    assert told[-1]["error"]["type"] == "timeout_error"


def test_the_job_of_a_client_that_left_is_cancelled(site: Site) -> None:
    def cancelled() -> float:
        text = httpx.get(f"{site.url}/metrics").text
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("tidemill_gateway_cancelled_jobs_total")
        )

    before = cancelled()
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", f"{site.url}{PATH}", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    wait_until(lambda: cancelled() == before + 1, timeout=20)
