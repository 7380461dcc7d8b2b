"""What requests for embeddings ask of the queue."""

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.async_client import AsyncProducer
from tidemill.gateway.checks import refuse
from tidemill.gateway.kind_plans import KindPlan
from tidemill.gateway.openai_models.embeddings import (
    EmbeddingRequest,
    EncoderRequest,
    KindRequest,
)
from tidemill.gateway.prompts import (
    TextOrIds,
    check_size,
    each_beside_loop,
    prompts_of,
)
from tidemill.gateway.shaping.encoders import embedding_list
from tidemill.job_kinds import EmbedSpec
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.requests import MAX_INPUTS
from tidemill.result import Result
from tidemill.service.tokenizer import Tokenizer

#: From so many numbers on, writing them down takes milliseconds.
_MANY_NUMBERS = 16 * 1024


async def plan_embeddings(
    producer: AsyncProducer, body: EmbeddingRequest, key: str | None = None
) -> KindPlan:
    """Return the job of a request; raises ``InvalidRequest`` naming the field that is wrong."""
    card = await producer.model(body.model)
    if body.messages is not None:
        raise refuse("messages", "conversations have no embeddings here", "Send input.")
    inputs: Sequence[TextOrIds] = prompts_of(body.input, field="input", limit=MAX_INPUTS)
    limit = cut_length(body, card)
    if limit is not None and limit < card.max_model_len:
        inputs = await _cut(inputs, await producer.tokenizer(body.model), card, limit)
    model = body.model or card.name
    size = body.dimensions or card.embedding_size

    def answer(results: Sequence[Result]) -> Mapping[str, Any]:
        return embedding_list(results[0], model, as_text=body.encoding_format == "base64")

    given: list[Any] = list(inputs)
    spec = EmbedSpec(given, **_options(body, limit, key))
    is_long = len(inputs) * size > _MANY_NUMBERS
    return KindPlan([spec], answer, _name_of, is_long)


def cut_length(body: EncoderRequest, card: ModelCard) -> int | None:
    """Return to how many tokens ``truncate_prompt_tokens`` cuts, special ones included.

    None: to none, -1 stands for as many as the model takes.  Raises ``InvalidRequest``.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return None
    if body.truncation_side == "left":
        raise refuse("truncation_side", "inputs can be cut at their end alone", "Leave it out.")
    if limit == 0:
        raise refuse("truncate_prompt_tokens", "it leaves no token")
    if limit > card.max_model_len:
        raise refuse(
            "truncate_prompt_tokens", f"it is more than the model's {card.max_model_len} tokens"
        )
    return card.max_model_len if limit == -1 else limit


def kind_options(body: KindRequest, key: str | None) -> dict[str, Any]:
    """Return the options that jobs of all kinds have."""
    options: dict[str, Any] = {"model": body.model, "idempotency_key": key}
    if body.priority is not None:
        options["priority"] = body.priority
    if body.deadline is not None:
        options["deadline"] = body.deadline
    if body.callback_url is not None:
        options["callback_url"] = body.callback_url
    if isinstance(body, EncoderRequest) and body.metadata is not None:
        options["metadata"] = body.metadata
    return options


def _options(body: EmbeddingRequest, limit: int | None, key: str | None) -> dict[str, Any]:
    options = {**kind_options(body, key), "truncate": limit is not None}
    if body.dimensions is not None:
        options["dimensions"] = body.dimensions
    normalize = body.use_activation if body.normalize is None else body.normalize
    if normalize is not None:
        options["normalize"] = normalize
    return options


async def _cut(
    inputs: Sequence[TextOrIds], tokenizer: Tokenizer, card: ModelCard, limit: int
) -> Sequence[TextOrIds]:
    def cut(item: TextOrIds) -> tuple[int, ...]:
        if not isinstance(item, str):
            return item[:limit]
        check_size("input", item, tokenizer, card, is_cut=True)
        return tokenizer.encode_whole(item, limit)

    return await each_beside_loop(cut, inputs)


def _name_of(index: int, field: str) -> str:
    # pydantic adds which of its alternatives it tried.
    first, *places = field.split(".")
    if first != "inputs":
        return field
    return ".".join(["input", *places[:1]])
