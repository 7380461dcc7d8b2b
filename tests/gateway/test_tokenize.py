"""Tokenising over HTTP is the model's own."""

import httpx2 as httpx

from gateway.client import ask
from gateway.conftest import MODEL, Site
from support.tiny_chat_model import CHAT_TEMPLATE, MAX_MODEL_LEN
from support.tiny_tokenizers import SPECIAL, byte_level_tokenizer


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
