"""What a request leaves out has the model's default, and what it says wins."""

from typing import Any

import pytest

from tidemill._request import JobSpec, make_job
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.options import job_options
from tidemill.protocol.codec import decode, encode
from tidemill.protocol.errors import ContextExceeded, InvalidRequest
from tidemill.protocol.messages import GenerateRequest, ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.sampling_defaults import SamplingDefaults

BASIC = {"name": "m", "revision": "r", "tokenizer_digest": "d"}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "max_tokens": 40}


def make_card(**defaults: Any) -> ModelCard:
    found = SamplingDefaults(**defaults)
    return ModelCard(**BASIC, max_model_len=100, vocab_size=500, sampling_defaults=found)


def queued(card: ModelCard, prompt: Any = (1, 2, 3), **options: Any) -> SamplingParams:
    """What workers read of a job that is submitted with these options."""
    draft = JobSpec(prompt, **options).draft("default")
    job = make_job("j", draft, card, b"", None)
    assert isinstance(job.request, GenerateRequest)
    return decode(encode(job.request), GenerateRequest).params


def test_what_is_left_out_has_the_models_default() -> None:
    params = queued(make_card(**DEFAULTS, repetition_penalty=1.1), stop="x")
    assert params == SamplingParams(**DEFAULTS, repetition_penalty=1.1, stop=("x",))


def test_a_value_wins_also_if_it_is_the_common_default() -> None:
    card = make_card(**DEFAULTS)
    said: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    want = SamplingParams(min_p=0.1, max_tokens=7, **said)
    assert queued(card, max_tokens=7, **said) == want
    assert queued(card, params=SamplingParams(max_tokens=7, **said)) == want
    assert queued(card, params=SamplingParams(**said), max_tokens=7) == want


def test_a_model_without_defaults_changes_nothing() -> None:
    assert queued(make_card()) == SamplingParams()


def test_the_default_number_of_tokens_is_what_the_context_has_room_for_at_most() -> None:
    card = make_card(max_tokens=40)
    assert queued(card, (1,) * 90).max_tokens == 10
    assert queued(card, max_tokens=None).max_tokens == 40
    assert queued(card, min_tokens=50).max_tokens is None
    with pytest.raises(ContextExceeded, match="prompt_ids"):
        queued(card, (1,) * 100)
    with pytest.raises(ContextExceeded, match=r"params\.min_tokens"):
        queued(card, (1,) * 90, min_tokens=11)


def test_a_text_that_nobody_has_tokenised_gets_no_number_of_tokens() -> None:
    params = queued(make_card(**DEFAULTS), "text")
    assert (params.temperature, params.max_tokens) == (0.6, None)


def test_the_job_counts_with_its_default_number_of_tokens() -> None:
    draft = JobSpec((1, 2), n=2).draft("default")
    job = make_job("j", draft, make_card(max_tokens=40), b"", None)
    assert (job.max_output, job.num_tokens) == (80, 82)


def test_a_default_that_the_request_does_not_go_with_is_told() -> None:
    with pytest.raises(InvalidRequest, match=r"^n: .*model's own defaults are temperature 0") as no:
        queued(make_card(temperature=0.0), n=2)
    assert no.value.field == "n"
    assert queued(make_card(temperature=0.0), n=2, temperature=0.5).temperature == 0.5


def test_beams_take_no_default_but_their_length() -> None:
    params = queued(make_card(**DEFAULTS), use_beam_search=True, best_of=2)
    assert params == SamplingParams(use_beam_search=True, best_of=2, max_tokens=40)


def test_a_card_of_a_worker_that_knows_no_defaults_is_read() -> None:
    card = ModelCard(**BASIC, max_model_len=100, vocab_size=500)
    assert b"sampling_defaults" not in encode(card)
    assert decode(encode(card), ModelCard).sampling_defaults == SamplingDefaults()
    told = make_card(**DEFAULTS)
    assert decode(encode(told), ModelCard) == told


def test_defaults_have_the_limits_of_the_parameters() -> None:
    for name, field in SamplingDefaults.model_fields.items():
        ours = SamplingParams.model_fields[name]
        assert field.metadata == ours.metadata or name in ("max_tokens", "top_k"), name
        for value in (-3, 0, 0.5, 1, 2, 3):
            assert _takes(SamplingDefaults, name, value) == _takes(SamplingParams, name, value)


def _takes(model: Any, name: str, value: float) -> bool:
    try:
        model(**{name: value})
    except ValueError:
        return False
    return True


def test_a_request_over_http_leaves_out_what_its_body_does() -> None:
    card, messages = make_card(**DEFAULTS), [{"role": "user", "content": "hi"}]
    for asked in ({}, {"temperature": 1.0, "top_k": 0}):
        body = ChatRequest.model_validate({"messages": messages, **asked})
        params = queued(card, **job_options(body))
        assert params == SamplingParams.model_validate({**DEFAULTS, **asked})
