"""Whether a served model can sample as a request asks: pure, the same in all processes."""

from collections.abc import Iterator

from tidemill.protocol.codec import MAX_RESULT_BYTES
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.sampling import ALL_LOGPROBS, SamplingParams

#: What a token id and its logprob take on the wire, at most.
LOGPROB_BYTES = 15
#: What a token's logprobs take beside its alternatives, at most.
_TOKEN_BYTES = 64


def check_sampling(params: SamplingParams, prompt_len: int, card: ModelCard) -> None:
    """Raise ``InvalidRequest``, naming the field and its limit, if ``params`` do not fit the model.

    ``prompt_len`` may be the least that it can be.
    """
    for field, ids in _token_ids(params):
        if ids and max(ids) >= card.vocab_size:
            raise InvalidRequest(
                f"params.{field}: token id {max(ids)} is outside the vocabulary of"
                f" {card.vocab_size}",
                field=f"params.{field}",
                fix="Use the tokenizer of the served model.",
            )
    _check_outputs(params, card)
    _check_thinking(params, card)
    _check_number("logprobs", params.logprobs, card)
    _check_number("prompt_logprobs", params.prompt_logprobs, card)
    _check_size(params, prompt_len, card)


def _token_ids(params: SamplingParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "logprob_token_ids", params.logprob_token_ids
    yield "logit_bias", tuple(token_id for token_id, _ in params.logit_bias)


def _check_outputs(params: SamplingParams, card: ModelCard) -> None:
    if params.num_outputs > card.max_n:
        field = "n" if params.best_of is None else "best_of"
        raise InvalidRequest(
            f"params.{field}: {params.num_outputs} outputs exceed the limit of {card.max_n} that"
            " the workers set",
            field=f"params.{field}",
            fix="Ask for fewer, or start the workers with a larger --max-n.",
        )


def _check_thinking(params: SamplingParams, card: ModelCard) -> None:
    if params.thinking_token_budget is not None and not card.reasoning_ids:
        raise InvalidRequest(
            f"params.thinking_token_budget: model {card.name!r} has no reasoning that a single"
            " token ends",
            field="params.thinking_token_budget",
            fix="Leave it out, or lower max_tokens.",
        )


def _check_number(field: str, number: int | None, card: ModelCard) -> None:
    limit = card.max_logprobs
    if number is None or limit == ALL_LOGPROBS or 0 <= number <= limit:
        return
    asked = "all logprobs" if number == ALL_LOGPROBS else str(number)
    raise InvalidRequest(
        f"params.{field}: {asked} exceed the limit of {limit} that the workers set",
        field=f"params.{field}",
        fix="Ask for fewer, or start the workers with a larger --max-logprobs.",
    )


def _check_size(params: SamplingParams, prompt_len: int, card: ModelCard) -> None:
    if params.logprobs is None and params.prompt_logprobs is None:
        return
    output_len = min(card.max_model_len - prompt_len, params.max_tokens or card.max_model_len)
    num_bytes = 0
    if params.logprobs is not None:
        num_asked = len(params.logprob_token_ids)
        num_bytes += params.n * output_len * _bytes_per_token(params.logprobs, num_asked, card)
    if params.prompt_logprobs is not None:
        num_bytes += prompt_len * _bytes_per_token(params.prompt_logprobs, 0, card)
    if num_bytes > MAX_RESULT_BYTES:
        field = "params.prompt_logprobs" if params.logprobs is None else "params.logprobs"
        raise InvalidRequest(
            f"{field}: those of {prompt_len} tokens of prompt and {output_len} of output may take"
            f" {num_bytes} bytes, a result holds {MAX_RESULT_BYTES}",
            field=field,
            fix="Ask for fewer of them, or lower max_tokens.",
        )


def _bytes_per_token(num_top: int, num_asked: int, card: ModelCard) -> int:
    num = card.vocab_size if num_top == ALL_LOGPROBS else min(num_top, card.vocab_size)
    return _TOKEN_BYTES + (num + num_asked) * LOGPROB_BYTES
