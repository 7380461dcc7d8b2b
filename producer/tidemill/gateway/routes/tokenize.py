"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from collections.abc import Iterable
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.call import Call, CurrentCall
from tidemill.gateway.chatting import continued
from tidemill.gateway.checks import refuse, valid_text
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.openai_models.tokenize import (
    Detokenized,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
)
from tidemill.gateway.prompts import check_size
from tidemill.openai.chat import chat_job
from tidemill.openai.token_texts import TokenTexts
from tidemill.protocol.codec import MAX_ARRAY_LEN
from tidemill.protocol.messages import ModelCard
from tidemill.service.offload import beside_loop
from tidemill.service.prompt import check_vocabulary
from tidemill.service.tokenizer import Tokenizer

router = APIRouter(tags=["tokenizer"], route_class=JsonRoute)


@router.post("/tokenize", response_model=Tokens)
async def tokenize(call: CurrentCall, body: TokenizeRequest) -> Response:
    """Turn a text or a conversation into token ids."""
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "exactly one of prompt and messages is needed")
    card, tokenizer = await _meant(call, body.model)
    answer = await beside_loop(partial(_tokenized, body, tokenizer, card))
    return Response(answer, media_type="application/json")


@router.post("/detokenize")
async def detokenize(call: CurrentCall, body: DetokenizeRequest) -> Detokenized:
    """Turn token ids into text."""
    card, tokenizer = await _meant(call, body.model)
    _check_ids(body.tokens, card)
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    text = await beside_loop(decode)
    return Detokenized(prompt=text)


@router.get("/tokenizer_info", response_model_exclude_none=True)
async def tokenizer_info(call: CurrentCall, model: str | None = None) -> TokenizerInfo:
    """Describe a model's tokenizer."""
    card, tokenizer = await _meant(call, model)
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


def only_generator(cards: Iterable[ModelCard]) -> str | None:
    """Return the name of the only model that generates, None if there are none or several."""
    names = [card.name for card in cards if card.task == "generate"]
    return names[0] if len(names) == 1 else None


async def _meant(call: Call, model: str | None) -> tuple[ModelCard, Tokenizer]:
    # Clients such as lm-eval name none here; what makes vectors beside it is not what they mean.
    name = only_generator(await call.producer.models()) if model is None else model
    return await call.producer.model(name), await call.producer.tokenizer(name)


def _tokenized(body: TokenizeRequest, tokenizer: Tokenizer, card: ModelCard) -> bytes:
    ids = _encode(body, tokenizer, card)
    answer = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids}
    if body.return_token_strs:
        texts = TokenTexts(tokenizer)
        answer["token_strs"] = [texts.text(token_id) for token_id in ids]
    return orjson.dumps(answer)


def _encode(body: TokenizeRequest, tokenizer: Tokenizer, card: ModelCard) -> list[int]:
    if body.prompt is not None:
        text = valid_text("prompt", body.prompt)
        check_size("prompt", text, tokenizer, card, is_cut=True)
        return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    job = chat_job(
        tokenizer,
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        template_options=body.chat_template_kwargs,
        check_prompt=lambda text: check_size("messages", text, tokenizer, card, is_cut=True),
    )
    if body.continue_final_message:
        job = continued(job, body.messages, tokenizer)
    if body.add_special_tokens:
        return tokenizer.encode(job.prompt)
    return list(job.prompt_ids)


def _check_ids(ids: list[int], card: ModelCard) -> None:
    if len(ids) > MAX_ARRAY_LEN:
        raise refuse("tokens", f"there are {len(ids)}, the limit is {MAX_ARRAY_LEN}")
    if any(token_id < 0 for token_id in ids):
        raise refuse("tokens", "a token id is not negative")
    check_vocabulary("tokens", tuple(ids), card)
