"""Sampling parameters: vLLM's defaults and limits, and what their values may look like."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tidemill.protocol.codec import decode, encode
from tidemill.protocol.messages import invalid_request
from tidemill.protocol.sampling import MAX_LOGIT_BIAS, RepetitionDetection, SamplingParams

#: Of vLLM's SamplingParams, which is not installed here.
VLLM_DEFAULTS = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "ignore_eos": False,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "allowed_token_ids": None,
    "repetition_detection": None,
}


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias.0.0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias.0.0"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias.0.1"),
        ({"logit_bias": [(1, 1.0), (1, 2.0)]}, "logit_bias"),
        ({"logit_bias": {1: 2.0, "1": 3.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": ["  "]}, "bad_words.0"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words.0"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logprobs": 0, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        (
            {"repetition_detection": {"max_pattern_size": 0}},
            "repetition_detection.max_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 1}},
            "repetition_detection.min_count",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 5}},
            "repetition_detection",
        ),
    ],
)
def test_a_value_out_of_its_limits_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate(values)
    assert invalid_request(caught.value).field == field


def test_token_ids_are_only_told_beside_logprobs() -> None:
    with pytest.raises(ValidationError, match="logprob_token_ids: they need logprobs"):
        SamplingParams(logprob_token_ids=(1,))


@pytest.mark.parametrize(
    "bias",
    [{7: 1.5, 2: -400}, {"7": 1.5, "2": -400}, [(7, 1.5), (2, -400)], ((2, -400), (7, 1.5))],
)
def test_a_bias_is_kept_as_clamped_pairs_by_id(bias: Any) -> None:
    params = SamplingParams.model_validate({"logit_bias": bias})
    assert params.logit_bias == ((2, -MAX_LOGIT_BIAS), (7, 1.5))
    from_json = SamplingParams.model_validate_json(json.dumps({"logit_bias": {"7": 1.5}}))
    assert from_json.logit_bias == ((7, 1.5),)


@given(
    st.builds(
        SamplingParams,
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.01, 10),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-200, 200)),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 10**6), min_size=1).map(tuple),
        bad_words=st.lists(st.text("aé🙂 ", min_size=1).map("x".__add__), max_size=5).map(tuple),
        logprobs=st.integers(-1, 20),
        prompt_logprobs=st.none() | st.integers(-1, 20),
        logprob_token_ids=st.lists(st.integers(0, 99), max_size=5).map(tuple),
    )
)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    assert decode(encode(params), SamplingParams) == params


def test_every_parameter_is_in_the_table_of_the_engines_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    section = page.split("## Sampling\n", 1)[1].split("\n## ", 1)[0]
    documented = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    assert set(SamplingParams.model_fields) <= documented


def test_the_longest_pattern_of_a_repetition_is_bounded() -> None:
    assert RepetitionDetection(max_pattern_size=1024).max_pattern_size == 1024
    with pytest.raises(ValidationError, match="less than or equal to 1024"):
        RepetitionDetection(max_pattern_size=1025)
