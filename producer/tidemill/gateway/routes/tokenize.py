"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

import asyncio

from fastapi import APIRouter

from tidemill.gateway.call import CurrentCall
from tidemill.gateway.chatting import continued
from tidemill.gateway.checks import refuse, valid_text
from tidemill.gateway.openai_models.tokenize import (
    Detokenized,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
)
from tidemill.openai.chat import chat_job
from tidemill.openai.token_texts import TokenTexts
from tidemill.protocol.messages import ModelCard
from tidemill.service.prompt import check_vocabulary
from tidemill.service.tokenizer import Tokenizer

router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize", response_model_exclude_none=True)
async def tokenize(call: CurrentCall, body: TokenizeRequest) -> Tokens:
    """Turn a text or a conversation into token ids."""
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "exactly one of prompt and messages is needed")
    card = await call.producer.model(body.model)
    tokenizer = await call.producer.tokenizer(body.model)
    # Off the event loop: a text may be as long as a body may be.
    ids = await asyncio.to_thread(_encode, body, tokenizer)
    texts = TokenTexts(tokenizer) if body.return_token_strs else None
    return Tokens(
        count=len(ids),
        max_model_len=card.max_model_len,
        tokens=ids,
        token_strs=None if texts is None else [texts.text(token_id) for token_id in ids],
    )


@router.post("/detokenize")
async def detokenize(call: CurrentCall, body: DetokenizeRequest) -> Detokenized:
    """Turn token ids into text."""
    card = await call.producer.model(body.model)
    tokenizer = await call.producer.tokenizer(body.model)
    _check_ids(body.tokens, card)
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text)


@router.get("/tokenizer_info", response_model_exclude_none=True)
async def tokenizer_info(call: CurrentCall, model: str | None = None) -> TokenizerInfo:
    """Describe a model's tokenizer."""
    card = await call.producer.model(model)
    tokenizer = await call.producer.tokenizer(model)
    special = tokenizer.special_tokens
    return TokenizerInfo(
        model=card.name,
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=tokenizer.vocab_size,
        model_max_length=card.max_model_len,
        eos_token=special.get("eos_token"),
        bos_token=special.get("bos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        chat_template=tokenizer.chat_template or None,
    )


def _encode(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(
            valid_text("prompt", body.prompt),
            add_special_tokens=body.add_special_tokens is not False,
        )
    job = chat_job(
        tokenizer,
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        template_options=body.chat_template_kwargs,
    )
    if body.continue_final_message:
        job = continued(job, body.messages, tokenizer)
    if body.add_special_tokens:
        return tokenizer.encode(job.prompt)
    return list(job.prompt_ids)


def _check_ids(ids: list[int], card: ModelCard) -> None:
    if any(token_id < 0 for token_id in ids):
        raise refuse("tokens", "a token id is not negative")
    check_vocabulary("tokens", tuple(ids), card)
