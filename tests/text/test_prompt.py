"""A request becomes a checked, hashed prompt or a refusal that names the field and the limit."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import cbor2
import pytest

from support.tiny_tokenizers import SPECIAL, byte_level_tokenizer
from tidemill.protocol.errors import ConfigError, ContextExceeded, InvalidRequest
from tidemill.protocol.messages import ChatMessage, GenerateRequest, ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.service import prompt
from tidemill.service.tokenizer import Tokenizer

CARD = ModelCard(
    name="m", revision="r1", tokenizer_digest="d" * 64, max_model_len=100, vocab_size=500
)
SALT = bytes(range(16))


def request(**fields: Any) -> GenerateRequest:
    if not fields.keys() & {"prompt", "messages"}:
        fields.setdefault("prompt_ids", (1, 2, 3))
    return GenerateRequest(model="m", **fields)


def refusal(request: GenerateRequest, prompt_len: int = 3) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        prompt.validate(request, prompt_len, CARD)
    assert "\n" not in caught.value.one_line()
    assert caught.value.fix
    return caught.value


def test_ids_are_taken_as_they_are_without_a_tokenizer() -> None:
    assert prompt.tokenize(request(prompt_ids=(5, 6)), None, CARD) == (5, 6)


def test_text_without_a_tokenizer_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        prompt.tokenize(request(prompt="hi"), None, CARD)


@pytest.mark.model
def test_text_and_messages_become_the_ids_of_transformers(demo_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(demo_model_dir)
    ours = Tokenizer.from_directory(demo_model_dir)
    assert prompt.tokenize(request(prompt="hi  42"), ours, CARD) == tuple(
        reference.encode("hi  42")
    )
    turn = {"role": "user", "content": "hi"}
    want = reference.apply_chat_template([turn], add_generation_prompt=True)["input_ids"]
    assert prompt.tokenize(request(messages=(ChatMessage(**turn),)), ours, CARD) == tuple(want)


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_level_tokenizer()
    # The longest of its tokens is the special one.
    room = (CARD.max_model_len - 1) * len(SPECIAL)
    assert prompt.tokenize(request(prompt=SPECIAL * 99), tokenizer, CARD) == (262,) * 99
    monkeypatch.delattr(Tokenizer, "encode")
    with pytest.raises(ContextExceeded, match=f"length is 100 tokens .* has {room + 1} char") as e:
        prompt.tokenize(request(prompt="a" * (room + 1)), tokenizer, CARD)
    assert e.value.field == "prompt"


def test_a_conversation_of_too_many_messages_is_refused_before_its_template_runs() -> None:
    turns = (ChatMessage(role="user", content=""),) * (prompt.MAX_MESSAGES + 1)
    with pytest.raises(InvalidRequest, match="messages: there are 8193, the limit is 8192"):
        prompt.tokenize(request(messages=turns), byte_level_tokenizer(), CARD)


def test_a_request_that_fits_exactly_is_accepted() -> None:
    prompt.validate(request(params=SamplingParams(max_tokens=97)), 3, CARD)
    prompt.validate(request(), 99, CARD)
    prompt.validate(request(prompt_ids=(499,), tokenizer_digest="d" * 64), 1, CARD)


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_prompt_without_tokens_is_refused_by_the_name_of_its_field(field: str) -> None:
    value = "x" if field == "prompt" else (ChatMessage(role="user", content=""),)
    assert refusal(request(**{field: value}), 0).field == field


def test_a_prompt_that_leaves_no_room_is_refused_with_the_limit() -> None:
    error = refusal(request(), 100)
    assert error.field == "prompt_ids"
    assert "100 tokens" in error.message and "99" in error.fix


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_more_output_than_the_context_holds_is_refused_with_the_room(field: str) -> None:
    error = refusal(request(params=SamplingParams(**{field: 98})))
    assert error.field == f"params.{field}"
    assert "97" in error.fix


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_ids": (3, 500)}, "prompt_ids"),
        ({"params": SamplingParams(stop_token_ids=(2, 777))}, "params.stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any], field: str) -> None:
    error = refusal(request(**fields))
    assert error.field == field
    assert "500" in error.message


def test_ids_of_another_tokenizer_are_refused() -> None:
    assert refusal(request(tokenizer_digest="e" * 64)).field == "tokenizer_digest"


def test_prepare_checks_before_it_hashes() -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        prompt.prepare(request(prompt_ids=(500,)), None, CARD, SALT)


def test_the_routing_key_is_every_fourth_hash_of_the_salted_chain() -> None:
    card = CARD.model_copy(update={"block_size": 4})
    ids = tuple(range(50))
    prepared = prompt.prepare(request(prompt_ids=ids, cache_salt="mine"), None, card, SALT)
    extra: Any = (("cache_salt", (SALT + b"r1").hex() + "/mine"),)
    parent = sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
    hashes = []
    for start in range(0, 48, 4):
        block = (parent, ids[start : start + 4], extra)
        parent = sha256(cbor2.dumps(block, canonical=True)).digest()
        hashes.append(parent)
        extra = None
    assert prepared.routing_key == hashes[3][:8] + hashes[7][:8] + hashes[11][:8]
    assert prepared.ids == ids
    assert prepared.cost == 50


def test_a_prefix_id_goes_before_the_hashes_of_the_tokens() -> None:
    card = CARD.model_copy(update={"block_size": 4})
    ids = tuple(range(50))
    plain = prompt.prepare(request(prompt_ids=ids), None, card, SALT)
    named = prompt.prepare(request(prompt_ids=ids, prefix_id="p"), None, card, SALT)
    extra = (("cache_salt", (SALT + b"r1").hex()),)
    digest = sha256(cbor2.dumps(("prefix_id", "p", extra), canonical=True)).digest()
    assert named.routing_key == digest[:8] + plain.routing_key
    assert (plain.hint_depth, named.hint_depth) == (0, 1)
    assert (named.ids, named.cost) == (plain.ids, plain.cost)


def test_a_prompt_too_short_for_a_hash_is_placed_by_its_prefix_id() -> None:
    keys = [
        prompt.prepare(request(prefix_id=name, cache_salt=narrow), None, CARD, salt).routing_key
        for name in ("p", "q")
        for narrow in (None, "mine")
        for salt in (SALT, SALT[::-1])
    ]
    assert {len(key) for key in keys} == {8}
    assert len(set(keys)) == 8, "neither tenants nor cache salts share a name"
    assert prompt.prepare(request(), None, CARD, SALT).routing_key == b""


def test_tenants_revisions_and_cache_salts_do_not_share_prefixes() -> None:
    keys = {
        prompt.extra_keys(salt, revision, cache_salt)
        for salt in (SALT, SALT[::-1])
        for revision in ("r1", "r2")
        for cache_salt in (None, "a", "b")
    }
    assert len(keys) == 12
