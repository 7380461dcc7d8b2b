"""The prompts of a request for completions: texts, or token ids."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tidemill.gateway.checks import refuse, valid_text
from tidemill.gateway.openai_models.sampling import GenerationRequest
from tidemill.protocol.codec import MAX_ARRAY_LEN
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import ModelCard
from tidemill.service.tokenizer import Tokenizer

MAX_PROMPTS = 1024
#: From this length on, tokenising would hold up the event loop for milliseconds.
LONG_CHARS = 16 * 1024

TextOrIds = str | tuple[int, ...]


def prompts_of(prompt: Any, *, field: str = "prompt", limit: int = MAX_PROMPTS) -> list[TextOrIds]:
    """Return the prompts, ``limit`` at most, that a field stands for; raises ``InvalidRequest``."""
    if isinstance(prompt, str):
        return [valid_text(field, prompt)]
    if not isinstance(prompt, list):
        raise refuse(field, "it is neither text nor a list")
    if not prompt:
        raise refuse(field, "it is empty")
    if type(prompt[0]) is int:
        return [_ids(prompt, field)]
    if len(prompt) > limit:
        raise refuse(field, f"there are {len(prompt)}, the limit is {limit}")
    return [
        valid_text(field, each) if isinstance(each, str) else _ids(each, field) for each in prompt
    ]


async def token_ids(
    prompts: Sequence[TextOrIds],
    tokenizer: Tokenizer,
    body: GenerationRequest,
    card: ModelCard,
    *,
    max_tokens: int | None,
) -> list[tuple[int, ...]]:
    """Return the prompts' token ids, cut as the request says."""
    adds_special = body.add_special_tokens is not False

    def encode() -> list[tuple[int, ...]]:
        return [
            cut(_encoded(prompt, tokenizer, adds_special), body, card, max_tokens)
            for prompt in prompts
        ]

    if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < LONG_CHARS:
        return encode()
    return await asyncio.to_thread(encode)


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


def _encoded(prompt: TextOrIds, tokenizer: Tokenizer, adds_special: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special_tokens=adds_special))
    return prompt


def _ids(prompt: Any, field: str) -> tuple[int, ...]:
    if not isinstance(prompt, list) or not prompt:
        raise refuse(field, "one of them is neither text nor a list of token ids")
    if set(map(type, prompt)) != {int}:
        raise refuse(field, "a list of token ids holds something else")
    if len(prompt) > MAX_ARRAY_LEN:
        raise refuse(field, f"it has {len(prompt)} tokens, the limit is {MAX_ARRAY_LEN}")
    return tuple(prompt)
