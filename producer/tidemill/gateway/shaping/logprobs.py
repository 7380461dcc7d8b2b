"""Logprobs in the shapes of completions and of chats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.openai.token_texts import TokenTexts
from tidemill.protocol.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are told: their texts, or ``token_id:N`` where a client asks for that."""

    texts: TokenTexts
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        """Return a token's name."""
        return f"token_id:{token_id}" if self.as_ids else self.texts.text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """Return a token's bytes."""
        return list(self.texts.bytes_of(token_id))


@dataclass(slots=True)
class CompletionTokens:
    """Builds the ``logprobs`` of one choice of a completion, or of the events of its stream.

    The offset of a token is the number of characters told before it.
    """

    names: TokenNames
    offset: int = 0

    def take(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """Return the object for these tokens, which follow those of the last call."""
        told: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, logprob in zip(ids, logprobs, strict=True):
            told["text_offset"].append(self.offset)
            told["tokens"].append(self.names.name(token_id))
            told["token_logprobs"].append(None if logprob is None else logprob.logprob)
            told["top_logprobs"].append(self._top(token_id, logprob))
            self.offset += len(self.names.texts.text(token_id))
        return told

    def _top(self, token_id: int, logprob: TokenLogprobs | None) -> dict[str, float] | None:
        if logprob is None:
            return None
        told: dict[str, float] = {}
        # The likeliest first: of tokens with one name only that one is told.
        for other, value in (*logprob.top, (token_id, logprob.logprob), *logprob.asked):
            told.setdefault(self.names.name(other), value)
        return told


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], names: TokenNames
) -> dict[str, Any]:
    """Return the ``logprobs`` of a choice of a chat, or of an event of its stream."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name, content = names.name(token_id), names.bytes_of(token_id)
        return {"token": name, "logprob": logprob, "bytes": content}

    content = [
        entry(token_id, told.logprob)
        | {"top_logprobs": [entry(*other) for other in (*told.top, *told.asked)]}
        for token_id, told in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return what vLLM calls ``prompt_logprobs``: of each place its tokens, by id."""

    def place(token_id: int, told: TokenLogprobs | None) -> dict[str, Any] | None:
        if told is None:
            return None
        own = {token_id: _ranked(token_id, told.logprob, told.rank, names)}
        top = {
            other: _ranked(other, value, rank, names)
            for rank, (other, value) in enumerate(told.top, start=1)
        }
        return {str(token): entry for token, entry in (own | top).items()}

    return [place(*each) for each in zip(ids, logprobs, strict=True)]


def _ranked(token_id: int, logprob: float, rank: int, names: TokenNames) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": names.name(token_id)}
