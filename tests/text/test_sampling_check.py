"""What a served model cannot follow is refused by field and limit."""

from typing import Any

import pytest

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.sampling_check import check_sampling


def make_card(**fields: Any) -> ModelCard:
    values = {"name": "m", "revision": "r", "tokenizer_digest": "d", "max_model_len": 1000}
    return ModelCard(**{"vocab_size": 500, **values, **fields})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"allowed_token_ids": [1, 500]}, "params.allowed_token_ids: token id 500 .* 500"),
        ({"logit_bias": {1: 1.0, 700: 2.0}}, "params.logit_bias: token id 700"),
        ({"logprobs": 0, "logprob_token_ids": [501]}, "params.logprob_token_ids: token id 501"),
        ({"logprobs": 21}, "params.logprobs: 21 exceed the limit of 20"),
        ({"logprobs": -1}, "params.logprobs: all logprobs exceed the limit of 20"),
        ({"prompt_logprobs": 21}, "params.prompt_logprobs: 21 exceed the limit of 20"),
    ],
)
def test_what_the_model_cannot_follow_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        check_sampling(SamplingParams.model_validate(values), 10, make_card())
    assert caught.value.fix and str(caught.value).startswith(caught.value.field)


def test_what_the_model_can_follow_passes() -> None:
    params = SamplingParams(
        allowed_token_ids=(0, 499),
        logit_bias=((499, 1.0),),
        logprobs=20,
        prompt_logprobs=20,
        logprob_token_ids=(499,),
    )
    check_sampling(params, 10, make_card())
    check_sampling(SamplingParams(logprobs=-1, max_tokens=10), 10, make_card(max_logprobs=-1))


def test_logprobs_that_a_result_cannot_hold_are_refused_before_they_are_computed() -> None:
    card = make_card(max_model_len=200_000, vocab_size=50_000, max_logprobs=-1)
    fits = SamplingParams(logprobs=-1, max_tokens=20)
    check_sampling(fits, 10, card)
    for params, field in (
        (fits.model_copy(update={"max_tokens": 30}), "params.logprobs"),
        (SamplingParams(logprobs=20), "params.logprobs"),
        (SamplingParams(prompt_logprobs=-1), "params.prompt_logprobs"),
    ):
        with pytest.raises(InvalidRequest, match="a result holds") as caught:
            check_sampling(params, 1000, card)
        assert caught.value.field == field
    check_sampling(SamplingParams(), 1000, card)
