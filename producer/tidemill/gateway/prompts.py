"""The prompts of a request for completions: texts, or token ids."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from tidemill.gateway.checks import refuse, valid_text
from tidemill.gateway.openai_models.sampling import GenerationRequest
from tidemill.protocol.codec import MAX_ARRAY_LEN, MAX_MESSAGE_BYTES
from tidemill.protocol.errors import ContextExceeded, InvalidRequest
from tidemill.protocol.messages import ModelCard
from tidemill.service.offload import beside_loop
from tidemill.service.prompt import check_text
from tidemill.service.tokenizer import Tokenizer

MAX_PROMPTS = 1024
#: Of any text that is tokenised, in UTF-8; no job may have a longer one either.
MAX_TEXT_BYTES = MAX_MESSAGE_BYTES
#: From this length on, tokenising would hold up the event loop for milliseconds.
LONG_CHARS = 16 * 1024

T = TypeVar("T")

TextOrIds = str | tuple[int, ...]


def prompts_of(prompt: Any, *, field: str = "prompt", limit: int = MAX_PROMPTS) -> list[TextOrIds]:
    """Return the prompts, ``limit`` at most, that a field stands for; raises ``InvalidRequest``."""
    if isinstance(prompt, str):
        return [_text(field, prompt)]
    if not isinstance(prompt, list):
        raise refuse(field, "it is neither text nor a list")
    if not prompt:
        raise refuse(field, "it is empty")
    if type(prompt[0]) is int:
        return [_ids(prompt, field)]
    if len(prompt) > limit:
        raise refuse(field, f"there are {len(prompt)}, the limit is {limit}")
    return [_text(field, each) if isinstance(each, str) else _ids(each, field) for each in prompt]


async def token_ids(
    prompts: Sequence[TextOrIds],
    tokenizer: Tokenizer,
    body: GenerationRequest,
    card: ModelCard,
    *,
    max_tokens: int | None,
) -> list[tuple[int, ...]]:
    """Return the prompts' token ids, cut as the request says; raises ``InvalidRequest``."""
    adds_special = body.add_special_tokens is not False
    is_cut = body.truncate_prompt_tokens is not None

    def encode(prompt: TextOrIds) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return cut(prompt, body, card, max_tokens)
        check_size("prompt", prompt, tokenizer, card, is_cut=is_cut)
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=adds_special))
        return cut(ids, body, card, max_tokens)

    return await each_beside_loop(encode, prompts)


async def each_beside_loop(
    encode: Callable[[TextOrIds], T], inputs: Sequence[TextOrIds]
) -> list[T]:
    """Return what ``encode`` makes of each input, without holding up the event loop.

    Other requests have their turn between any two of them.
    """
    if sum(len(each) for each in inputs if isinstance(each, str)) < LONG_CHARS:
        return [encode(each) for each in inputs]
    return [await beside_loop(partial(encode, each)) for each in inputs]


def check_size(
    field: str, text: str, tokenizer: Tokenizer, card: ModelCard, *, is_cut: bool = False
) -> None:
    """Raise ``ContextExceeded`` for a text that is too long to be tokenised.

    One that ``is_cut`` afterwards, or is no prompt at all, may be longer than any prompt.
    """
    if not is_cut:
        check_text(field, text, tokenizer, card)
    _check_bytes(field, len(text.encode()))


def cut(
    ids: tuple[int, ...], body: GenerationRequest, card: ModelCard, max_tokens: int | None
) -> tuple[int, ...]:
    """Return the ids that ``truncate_prompt_tokens`` leaves; -1: as many as the model takes."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        keep = max(1, card.max_model_len - (max_tokens or 1))
    if keep == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: it leaves no token", field="truncate_prompt_tokens"
        )
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def _text(field: str, text: str) -> str:
    # Before anything is done with it: it has at least as many bytes as characters.
    _check_bytes(field, len(text))
    return valid_text(field, text)


def _check_bytes(field: str, num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise ContextExceeded(
            f"{field}: it has {num_bytes} bytes or more, the limit of a text is {MAX_TEXT_BYTES}",
            field=field,
            fix="Send it in pieces.",
        )


def _ids(prompt: Any, field: str) -> tuple[int, ...]:
    if not isinstance(prompt, list) or not prompt:
        raise refuse(field, "one of them is neither text nor a list of token ids")
    if set(map(type, prompt)) != {int}:
        raise refuse(field, "a list of token ids holds something else")
    if len(prompt) > MAX_ARRAY_LEN:
        raise refuse(field, f"it has {len(prompt)} tokens, the limit is {MAX_ARRAY_LEN}")
    return tuple(prompt)
