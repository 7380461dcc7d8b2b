"""Text to token ids and back, for every process that needs it; neither torch nor transformers.

A worker reads the tokenizer of its model directory and stores it in Redis as a *bundle*, named by
its digest; producers and schedulers load it from there.  Equal digests mean equal token ids.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

from tidemill.protocol.codec import pack, unpack
from tidemill.protocol.errors import DamagedModel, InvalidRequest, MalformedMessage
from tidemill.protocol.messages import ChatMessage
from tidemill.service.chat_template import ChatTemplate
from tidemill.service.tokenizer_files import (
    TokenizerFiles,
    chat_template_path,
    read_tokenizer_files,
)

#: Bounds on a bundle, compressed and not; the largest tokenizer in use has 33 MB of JSON.
MAX_BUNDLE_BYTES = 1 << 25
MAX_CONTENT_BYTES = 1 << 27

_TOKENIZER_JSON = "tokenizer.json"
#: From so many characters or ids on, a call lets go of the interpreter; below, the library's
#: thread pool costs more than the milliseconds for which others stand still.
_LONG = 8 * 1024


class TokenPair(NamedTuple):
    """Two texts as one row of ids; ``type_ids`` tell which of them each belongs to."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


class Tokenizer:
    """One model's tokenizer and chat template; immutable, safe to share between threads.

    Raises ``DamagedModel``, which names ``origin``, if the content cannot be understood.
    """

    def __init__(self, files: TokenizerFiles, *, origin: str = _TOKENIZER_JSON) -> None:
        self._files = files
        self.raw = _parse(files.tokenizer_json, origin)
        added = self.raw.get_added_tokens_decoder()
        self.all_special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self.raw.get_vocab_size()
        self.eos_token_ids = self._eos_token_ids()

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read a Hugging Face model directory; raises ``ModelNotFound`` or ``DamagedModel``."""
        files = read_tokenizer_files(directory)
        tokenizer = cls(files, origin=str(directory / _TOKENIZER_JSON))
        if tokenizer._template is not None:
            tokenizer._template.check(chat_template_path(directory))
        return tokenizer

    @classmethod
    def from_bundle(cls, bundle: bytes) -> "Tokenizer":
        """Read what ``to_bundle`` wrote; raises ``MalformedMessage`` if it is not, or too large."""
        try:
            return cls(_from_content(_decompress(bundle)))
        except DamagedModel as error:
            raise MalformedMessage(f"tokenizer bundle: {error.message}") from error

    def to_bundle(self) -> bytes:
        """All of this tokenizer in one compressed piece."""
        return zlib.compress(self._content, 6)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the uncompressed bundle."""
        return sha256(self._content).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether ``messages`` can be rendered."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; special tokens that it spells out become one id."""
        return self._encoding(text, add_special_tokens=add_special_tokens).ids

    def encode_whole(self, text: str, limit: int | None = None) -> tuple[int, ...]:
        """Return the ids of ``text`` with special tokens, cut to ``limit`` ids in all.

        The special tokens stay whatever is cut.
        """
        encoding = self._encoding(text)
        if limit is not None:
            encoding.truncate(max(0, limit - self.raw.num_special_tokens_to_add(False)))
        return tuple(self.raw.post_process(encoding).ids)

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> TokenPair:
        """Return the ids of two texts as the model reads pairs; only the second one is cut."""
        one, two = self._encoding(first), self._encoding(second)
        if limit is not None:
            two.truncate(max(0, limit - len(one.ids) - self.raw.num_special_tokens_to_add(True)))
        pair = self.raw.post_process(one, two)
        return TokenPair(tuple(pair.ids), tuple(pair.type_ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        if len(ids) < _LONG:
            return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
        [text] = self.raw.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of the longest token: a text of n times as many has n tokens at least.

        None for a tokenizer that drops text, or has one token for all that it does not know.
        """
        model, decoder = self.raw.model, self.raw.decoder
        is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        if not isinstance(model, models.BPE) or not (is_byte_level or model.byte_fallback):
            return None
        return max(map(len, self.raw.get_vocab()), default=1)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self._files.chat_template or ""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of ``bos_token`` and so on, as far as the model has them."""
        return self._files.special_tokens

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation; encode the result with ``add_special_tokens=False``.

        ``tools`` and ``options`` are as in ``ChatTemplate.render``.
        Raises ``InvalidRequest`` if there is no template or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "messages: the model has no chat template",
                field="messages",
                fix="Send prompt instead, or serve a model tuned for chat.",
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
        )

    def _encoding(self, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
        if len(text) < _LONG:
            return self.raw.encode(text, add_special_tokens=add_special_tokens)
        # Unlike ``encode`` this lets other threads run meanwhile, and it keeps no offsets.
        [encoding] = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self._files.chat_template
        return None if source is None else ChatTemplate(source, self._files.special_tokens)

    @cached_property
    def _content(self) -> bytes:
        files = self._files
        return pack(
            {
                "tokenizer": files.tokenizer_json,
                "chat_template": files.chat_template,
                "special_tokens": dict(sorted(files.special_tokens.items())),
                "eos_token_ids": list(self.eos_token_ids),
            }
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        if self._files.eos_token_ids is not None:
            return self._files.eos_token_ids
        named = self.raw.token_to_id(self._files.special_tokens.get("eos_token", ""))
        return () if named is None else (named,)


def _parse(tokenizer_json: str, origin: str) -> tokenizers.Tokenizer:
    try:
        raw = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise DamagedModel(
            f"{origin} cannot be read: {error}", fix="Fetch the model again."
        ) from error
    # Left over from training in some models; prompts are neither cut nor padded.
    raw.no_truncation()
    raw.no_padding()
    return raw


def _decompress(bundle: bytes) -> bytes:
    if len(bundle) > MAX_BUNDLE_BYTES:
        raise MalformedMessage(f"tokenizer bundle: larger than {MAX_BUNDLE_BYTES} bytes")
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(bundle, MAX_CONTENT_BYTES)
    except zlib.error as error:
        raise MalformedMessage(f"tokenizer bundle: {error}") from error
    if not inflater.eof:
        raise MalformedMessage(
            f"tokenizer bundle: cut off, or larger than {MAX_CONTENT_BYTES} bytes inflated"
        )
    return content


def _from_content(content: bytes) -> TokenizerFiles:
    fields = unpack(content, max_bytes=MAX_CONTENT_BYTES)
    try:
        template = fields["chat_template"]
        return TokenizerFiles(
            tokenizer_json=_text(fields["tokenizer"]),
            chat_template=None if template is None else _text(template),
            special_tokens={_text(k): _text(v) for k, v in fields["special_tokens"].items()},
            eos_token_ids=tuple(int(token_id) for token_id in fields["eos_token_ids"]),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise MalformedMessage(f"tokenizer bundle: {error!r}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text expected, not {type(value).__name__}")
    return value
