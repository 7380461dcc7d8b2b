"""From token ids to text, one token at a time."""

from tokenizers.decoders import ByteLevel

from tidemill.service.tokenizer import Tokenizer

#: What a decoder writes for bytes that are not, or not yet, UTF-8.
_REPLACEMENT = "\ufffd"

#: A character has at most 4 bytes; longer runs that make no text will never make any.
_MAX_PENDING = 64


class Detokenizer:
    """Gives out text as soon as no later token can change it.

        ids: ...  [ context ][ pending ]   <- push
        text:  told ........|  not told

    The texts of all pushes and the flush make up the text of all ids decoded at once.  Only where
    a SentencePiece model writes bytes that are not UTF-8 does decoding at once also garble the
    valid bytes beside them, which are told here as they came.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        # Texts of added tokens, where none may be parted from the one before it.
        self._joined: dict[int, str] = {}
        if not (skip_special_tokens or spaces_between_special_tokens):
            added = tokenizer.raw.get_added_tokens_decoder()
            self._joined = {token_id: token.content for token_id, token in added.items()}
        self._last_id: int | None = None
        self._skip_special_tokens = skip_special_tokens
        # Other decoders treat the first token in their own way, so they are shown one before it.
        self._needs_context = not isinstance(tokenizer.raw.decoder, ByteLevel)
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is certain now."""
        last_id, self._last_id = self._last_id, token_id
        if token_id in self._joined and last_id in self._joined:
            return self.flush() + self._join(token_id)
        self._pending.append(token_id)
        text = self._decode([*self._context, *self._pending])
        is_whole = not text.endswith(_REPLACEMENT)
        return self._tell(text) if is_whole or len(self._pending) >= _MAX_PENDING else ""

    def flush(self) -> str:
        """Return the text of incomplete characters; nothing can complete them any more."""
        return self._tell(self._decode([*self._context, *self._pending])) if self._pending else ""

    def _join(self, token_id: int) -> str:
        self._context, self._context_text = [token_id], self._decode([token_id])
        return self._joined[token_id]

    def _tell(self, text: str) -> str:
        if text.startswith(self._context_text):
            new = text[len(self._context_text) :]
        else:
            new = self._decode(self._pending)
        # A context without text could not show a decoder that something precedes.
        if self._needs_context and (new or not self._context):
            self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending = []
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
