"""What single tokens are, as text and as bytes, wherever they stand within a text."""

import re
from functools import cache

from tokenizers import pre_tokenizers

from tidemill.service.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
#: Memory for a vocabulary in use; each entry takes some 200 bytes.
_MAX_REMEMBERED = 1 << 16


class TokenTexts:
    """The tokens of one tokenizer; remembers those it was asked for.

    The bytes of a text's tokens joined are the text's bytes; the text of a token that holds part of
    a character has U+FFFD in its place.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._raw = tokenizer.raw
        self._added = tokenizer.raw.get_added_tokens_decoder()
        decoder: bytes = tokenizer.raw.decoder.__getstate__() if tokenizer.raw.decoder else b""
        self._is_byte_level = b"ByteLevel" in decoder
        self._has_byte_tokens = b"ByteFallback" in decoder
        self._has_space_marks = _SPACE.encode() in decoder or rb"\u2581" in decoder
        self._known: dict[int, bytes] = {}

    def text(self, token_id: int) -> str:
        """Return a token's text; empty if the vocabulary has no such token."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes in UTF-8, be they whole characters or not."""
        found = self._known.get(token_id)
        if found is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            values = _byte_values()
            return b"".join(values.get(char) or char.encode() for char in token)
        byte = _BYTE.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        if self._has_space_marks:
            return token.replace(_SPACE, " ").encode()
        return str(self._raw.decode([token_id], skip_special_tokens=False)).encode()


@cache
def _byte_values() -> dict[str, bytes]:
    """Return the bytes that the characters of byte-level tokens stand for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, for the characters from
    256 on (GPT-2).
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    values = {chr(byte): bytes([byte]) for byte in own}
    values |= {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}
    return values
