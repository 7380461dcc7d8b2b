"""Tokenising over HTTP is the model's own, and has its bounds."""

from typing import Any

import httpx2 as httpx
import pytest

from gateway.client import ask, post
from gateway.conftest import MODEL, Site
from support.tiny_chat_model import CHAT_TEMPLATE, MAX_MODEL_LEN
from support.tiny_tokenizers import SPECIAL, byte_level_tokenizer
from tidemill.gateway.app import MAX_PROMPT_BODY_BYTES
from tidemill.gateway.body_limit import MAX_COLONS, MAX_COMMAS, MAX_OPENED
from tidemill.gateway.prompts import MAX_TEXT_BYTES
from tidemill.gateway.routes.tokenize import only_generator
from tidemill.protocol.codec import MAX_ARRAY_LEN
from tidemill.protocol.messages import ModelCard
from tidemill.service.prompt import MAX_MESSAGES


def test_texts_become_ids_and_ids_texts(site: Site) -> None:
    expected = byte_level_tokenizer().encode("abc é")
    told = ask(site, "/tokenize", prompt="abc é", return_token_strs=True)
    assert told["tokens"] == expected and told["count"] == len(expected)
    assert told["max_model_len"] == MAX_MODEL_LEN and told["token_strs"][0] == "abc"
    assert ask(site, "/detokenize", tokens=expected) == {"prompt": "abc é"}


def test_a_conversation_becomes_the_ids_of_its_prompt(site: Site) -> None:
    messages = [{"role": "user", "content": "hi"}]
    open_turn = ask(site, "/tokenize", messages=messages)["tokens"]
    closed = ask(site, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(open_turn) == "user: hi\nassistant: "
    assert tokenizer.decode(closed) == "user: hi\n"


def test_the_tokenizer_is_described(site: Site) -> None:
    told = httpx.get(f"{site.url}/tokenizer_info", params={"model": MODEL}).json()
    assert told["eos_token"] == SPECIAL and told["chat_template"] == CHAT_TEMPLATE
    assert "bos_token" not in told


def test_who_names_no_model_means_the_only_one_that_generates() -> None:
    def card(name: str, task: Any) -> ModelCard:
        sizes = {"max_model_len": 8, "vocab_size": 9}
        return ModelCard(name=name, revision="r", tokenizer_digest="d", task=task, **sizes)

    cards = [card("minilm", "embed"), card("m", "generate"), card("whisper", "transcribe")]
    assert only_generator(cards) == "m"
    assert only_generator([*cards, card("other", "generate")]) is None
    assert only_generator([card("minilm", "embed")]) is None


def refused(site: Site, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = post(site, path, {"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    told: dict[str, Any] = answer.json()["error"]
    return told


def test_a_text_of_the_longest_length_is_tokenised_and_a_longer_one_refused(site: Site) -> None:
    text = "ab " * 5000
    told = ask(site, "/tokenize", prompt=text)
    assert told["tokens"] == byte_level_tokenizer().raw.encode(text).ids
    error = refused(site, "/tokenize", {"prompt": "é" * (MAX_TEXT_BYTES // 2 + 1)})
    assert error["param"] == "prompt" and f"limit of a text is {MAX_TEXT_BYTES}" in error["message"]
    messages = [{"role": "user", "content": "a" * MAX_TEXT_BYTES}]
    assert refused(site, "/tokenize", {"messages": messages})["param"] == "messages"


def test_too_many_ids_are_not_made_text(site: Site) -> None:
    ids = [5] * MAX_ARRAY_LEN
    text = byte_level_tokenizer().raw.decode([5])
    assert ask(site, "/detokenize", tokens=ids)["prompt"] == text * MAX_ARRAY_LEN
    error = refused(site, "/detokenize", {"tokens": [*ids, 5]})
    assert error["param"] == "tokens" and f"the limit is {MAX_ARRAY_LEN}" in error["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/tokenize", "messages"),
        ("/v1/chat/completions", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses/input_tokens", "input"),
    ],
)
def test_conversations_of_too_many_messages_are_refused(site: Site, path: str, field: str) -> None:
    turns = [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)
    error = refused(site, path, {field: turns})
    assert error["param"] == field and f"the limit is {MAX_MESSAGES}" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"echo": True, "logprobs": 1, "return_token_ids": True}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/messages/count_tokens", {}, "messages"),
        ("/v1/responses/input_tokens", {}, "input"),
    ],
)
def test_hopelessly_long_prompts_exceed_the_context(
    site: Site, path: str, body: dict[str, Any], field: str
) -> None:
    # All of it spaces and letters, of which no token holds more than a special one.
    text = "a " * (MAX_MODEL_LEN * len(SPECIAL))
    given = [{"role": "user", "content": text}] if field == "messages" else text
    error = refused(site, path, {**body, field: given})
    assert error["code"] == "context_length_exceeded" and error["param"] == field
    assert f"context length is {MAX_MODEL_LEN} tokens of {len(SPECIAL)} char" in error["message"]


def test_bodies_with_one_prompt_are_no_longer_than_that_takes(site: Site) -> None:
    text = "a" * MAX_PROMPT_BODY_BYTES
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions", "/v1/messages"):
        assert refused(site, path, {"prompt": text}, 413)["code"] == "request_too_large"
    # Many prompts may take more.
    assert refused(site, "/v1/completions", {"prompt": text})["param"] == "prompt"


@pytest.mark.parametrize(
    "values",
    [
        *("[]," * MAX_OPENED, "{}," * MAX_OPENED, "5," * (MAX_COMMAS + 1)),
        "{" + '"":0,' * (MAX_COLONS + 1) + '"":0},',
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_bodies_of_too_many_values_are_refused_before_they_are_read(
    site: Site, values: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = f'{{"prompt": [{values}5]}}'.encode()
    answer = httpx.post(f"{site.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 413 and "lists and objects" in answer.json()["error"]["message"]


def test_a_conversation_that_may_be_shortened_is_however_long_it_is(site: Site) -> None:
    old = [{"role": "user", "content": "a " * MAX_MODEL_LEN * len(SPECIAL)} for _ in range(3)]
    items = [*old, {"role": "user", "content": "hi"}]
    kept = ask(site, "/v1/responses/input_tokens", input=items[-1:])
    shortened = ask(site, "/v1/responses/input_tokens", input=items, truncation="auto")
    assert shortened["input_tokens"] == kept["input_tokens"]
