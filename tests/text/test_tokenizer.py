"""The tokenizer gives transformers' ids and texts, and survives the trip through a bundle."""

import json
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.protocol.errors import (
    DamagedModel,
    InvalidRequest,
    MalformedMessage,
    ModelNotFound,
)
from tidemill.protocol.messages import ChatMessage
from tidemill.service import tokenizer as tokenizer_module
from tidemill.service.tokenizer import Tokenizer

NASTY = [
    "",
    " ",
    "\n\n  \t x",
    "Hello, world!",
    "Naïve café — 12345 東京 🙂",
    "x  42   007\t1e9 ½ ١٢٣",
    "def f(x):\n    return {'a': [x**2, 0x1F]}  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|",
    "< |im_end|>",
    "a<|im_end|>b",
    "👩‍👩‍👧‍👦🏳️‍🌈é\u0301\u200b\u202e\ufeff",
    "\x00\x01\x7f\x85\u2028",
    "it's we'll I'D DON'T",
    "\U0010ffff\ue000",
    "a" * 500,
    " " * 200 + "end",
    "नमस्ते สวัสดี שלום مرحبا",
]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def ours(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(demo_model_dir)


@pytest.fixture(scope="module")
def reference(demo_model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_dir)


@pytest.mark.parametrize("text", NASTY)
def test_ids_and_texts_are_those_of_transformers(
    ours: Tokenizer, reference: Any, text: str
) -> None:
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == reference.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_has_the_ids_of_transformers(ours: Tokenizer, reference: Any, text: str) -> None:
    assert ours.encode(text) == reference.encode(text)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_ids_have_the_text_of_transformers(
    ours: Tokenizer, reference: Any, ids: list[int]
) -> None:
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_a_chat_is_rendered_and_tokenised_as_by_transformers(
    ours: Tokenizer, reference: Any
) -> None:
    chat = [
        {"role": "user", "content": "What is 2 + 40?"},
        {"role": "assistant", "content": "42 🙂"},
        {"role": "user", "content": "<|im_end|> thanks"},
    ]
    text = ours.apply_chat_template([ChatMessage(**turn) for turn in chat])
    want = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == want
    ids = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids


def test_special_ids_and_sizes_are_those_of_transformers(ours: Tokenizer, reference: Any) -> None:
    assert ours.eos_token_ids == (reference.eos_token_id,)
    assert ours.vocab_size == len(reference)
    assert ours.all_special_ids >= set(reference.all_special_ids)


def test_a_bundle_gives_back_the_same_tokenizer(ours: Tokenizer) -> None:
    copy = Tokenizer.from_bundle(ours.to_bundle())
    assert copy.digest == ours.digest
    assert copy.eos_token_ids == ours.eos_token_ids
    chat = [ChatMessage(role="user", content="hi")]
    assert copy.apply_chat_template(chat) == ours.apply_chat_template(chat)
    assert all(copy.encode(text) == ours.encode(text) for text in NASTY)


def test_the_digest_depends_on_every_part_of_the_tokenizer(
    ours: Tokenizer, demo_model_dir: Path, tmp_path: Path
) -> None:
    changes = {
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": json.dumps({"eos_token_id": [2, 0]}),
        "tokenizer_config.json": json.dumps({"bos_token": "<|im_end|>"}),
    }
    digests = {ours.digest}
    for changed, content in changes.items():
        directory = tmp_path / changed
        directory.mkdir()
        for name in ("tokenizer.json", *changes):
            (directory / name).write_text((demo_model_dir / name).read_text())
        assert Tokenizer.from_directory(directory).digest == ours.digest
        (directory / changed).write_text(content)
        digests.add(Tokenizer.from_directory(directory).digest)
    assert len(digests) == len(changes) + 1


def test_a_truncated_bundle_is_refused(ours: Tokenizer) -> None:
    bundle = ours.to_bundle()
    for damaged in (b"", b"garbage", bundle[:-10], bundle[: len(bundle) // 2]):
        with pytest.raises(MalformedMessage):
            Tokenizer.from_bundle(damaged)


def test_a_bundle_that_inflates_without_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_CONTENT_BYTES", 1 << 16)
    with pytest.raises(MalformedMessage, match="larger"):
        Tokenizer.from_bundle(zlib.compress(bytes(1 << 20)))
    monkeypatch.setattr(tokenizer_module, "MAX_BUNDLE_BYTES", 10)
    with pytest.raises(MalformedMessage, match="larger"):
        Tokenizer.from_bundle(bytes(11))


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"tokenizer": "{}"},
        {"tokenizer": 5, "chat_template": None, "special_tokens": {}, "eos_token_ids": []},
        {"tokenizer": "{}", "chat_template": None, "special_tokens": {}, "eos_token_ids": []},
    ],
)
def test_a_bundle_with_other_content_is_refused(content: Any) -> None:
    with pytest.raises(MalformedMessage):
        Tokenizer.from_bundle(zlib.compress(msgpack.packb(content)))


def tiny_directory(directory: Path, **files: Any) -> Path:
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<e>": 2}, "a"))
    raw.add_special_tokens(["<e>"])
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    raw.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    return directory


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tiny_directory(tmp_path)).encode("a b a b") == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "<e>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": {"content": "<e>", "lstrip": False}}}, (2,)),
        ({"special_tokens_map": {"eos_token": "<e>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<e>"}, "config": {"eos_token_id": 1}}, (1,)),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 0]}}, (2, 0)),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": None}}, (1,)),
    ],
)
def test_the_generation_config_names_the_ids_that_end_a_generation(
    tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert Tokenizer.from_directory(tiny_directory(tmp_path, **files)).eos_token_ids == ids


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = tiny_directory(tmp_path, tokenizer_config={"chat_template": named})
    message = ChatMessage(role="user", content="x")
    assert Tokenizer.from_directory(directory).apply_chat_template([message]) == "yes"


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(tiny_directory(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.apply_chat_template([ChatMessage(role="user", content="x")])
    assert caught.value.field == "messages"


def test_a_missing_directory_or_tokenizer_is_not_found(tmp_path: Path) -> None:
    for directory in (tmp_path / "none", tmp_path):
        with pytest.raises(ModelNotFound, match=str(directory)):
            Tokenizer.from_directory(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    tiny_directory(tmp_path)
    (tmp_path / name).write_bytes(b"{\xff")
    with pytest.raises(DamagedModel, match=name):
        Tokenizer.from_directory(tmp_path)
    for content in ("[]", "[" * 10**6):
        (tmp_path / name).write_text(content)
        with pytest.raises(DamagedModel, match=str(tmp_path / name)):
            Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("value", ["x", -1, True, 1.0, [1, "x"], {"id": 1}])
def test_an_eos_token_id_that_is_no_token_id_is_named(
    tmp_path: Path, name: str, value: Any
) -> None:
    directory = tiny_directory(tmp_path, **{name: {"eos_token_id": value}})
    with pytest.raises(DamagedModel, match=rf"/{name}\.json .*eos_token_id") as caught:
        Tokenizer.from_directory(directory)
    assert caught.value.fix


BROKEN = ["{% for x in messages %}", "{{ 'a' | no_such_filter }}", "{{ unclosed"]


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_cannot_be_compiled_names_its_file(tmp_path: Path, template: str) -> None:
    tiny_directory(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(DamagedModel, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(DamagedModel, match=r"chat_template\.jinja") as caught:
        Tokenizer.from_directory(tmp_path)
    assert caught.value.fix


@pytest.mark.parametrize("template", [5, {"default": "yes"}, [{"name": "default", "template": 5}]])
def test_a_template_that_is_no_text_is_damaged(tmp_path: Path, template: Any) -> None:
    directory = tiny_directory(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(DamagedModel, match=r"tokenizer_config\.json.*chat_template"):
        Tokenizer.from_directory(directory)


def test_long_texts_have_the_ids_of_transformers(ours: Tokenizer, reference: Any) -> None:
    several = "".join(f"{text}\n{' ' * index}\t" for index, text in enumerate(NASTY)) * 12
    for text in (several, " \n\t\u3000" * 3000, "<|im_end|>" * 1200, "é🙂" * 6000, "ab" * 8000):
        assert len(text) > tokenizer_module._LONG
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
        for skip in (True, False):
            long = ids * 4
            assert ours.decode(long, skip) == reference.decode(long, skip_special_tokens=skip)


def test_the_longest_token_is_that_of_transformers(ours: Tokenizer, reference: Any) -> None:
    texts = reference.batch_decode([[token_id] for token_id in range(len(reference))])
    assert ours.longest_token == max(map(len, texts))
