"""Reasoning that has used up its tokens is ended, whatever else a request asks for."""

from collections.abc import Sequence as Several
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from support.tiny_tokenizers import byte_level_tokenizer
from tidemill._request import JobSpec
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.options import job_options
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.sampling_check import check_sampling
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.loading.reasoning import reasoning_markers
from tidemill_gpuworker.sampling.sampler import LogprobsMode, Sampler
from tidemill_gpuworker.sampling.thinking import ReasoningMarkers, ThinkingBudget
from tidemill_gpuworker.speculation.draft_row import DraftRow

OPEN, CLOSE, EOS, VOCAB = 7, 8, 5, 20
MARKERS = ReasoningMarkers(OPEN, CLOSE)
CARD = ModelCard(name="m", revision="r", tokenizer_digest="d", max_model_len=99, vocab_size=VOCAB)


def must_end(ids: Several[int], budget: int) -> bool:
    """The rule itself: as many tokens since the last marker, if that one opens."""
    markers = [place for place, token in enumerate(ids) if token in MARKERS]
    return bool(markers) and ids[markers[-1]] == OPEN and len(ids) - markers[-1] - 1 >= budget


def make_seq(prompt: Several[int], output: Several[int] = (), **params: Any) -> Sequence:
    options = {"temperature": 0.0, "thinking_token_budget": 3} | params
    return Sequence("s", list(prompt), SamplingParams(**options), seed=1, output_ids=list(output))


def sampled(*rows: Any, mode: LogprobsMode = LogprobsMode.RAW) -> list[int]:
    logits = torch.zeros(len(rows), VOCAB)
    logits[:, 2] = 9.0
    sampler = Sampler([EOS], logprobs_mode=mode, markers=MARKERS)
    return [token.id for token in sampler.sample(logits, list(rows))]


@settings(max_examples=60)
@given(
    prompt=st.lists(st.sampled_from([1, 2, OPEN, CLOSE]), max_size=12),
    output=st.lists(st.sampled_from([1, 2, 3, 4, OPEN, CLOSE]), max_size=30),
    budget=st.integers(0, 6),
    every=st.integers(1, 4),
)
def test_what_is_kept_step_by_step_follows_from_the_tokens(
    prompt: list[int], output: list[int], budget: int, every: int
) -> None:
    kept = ThinkingBudget(MARKERS, budget, prompt)
    for size in range(0, len(output) + 1, every):
        known = output[:size]
        assert kept.copy().is_spent(known) == must_end(prompt + known, budget)
        assert kept.is_spent(known) == must_end(prompt + known, budget)
        assert ThinkingBudget(MARKERS, budget, prompt).is_spent(known) == kept.is_spent(known)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.5, "top_k": 1, "min_p": 0.9},
        {"allowed_token_ids": [2]},
        {"logit_bias": {CLOSE: -100.0}, "stop_token_ids": [CLOSE], "min_tokens": 50},
        {"repetition_penalty": 1.9, "presence_penalty": 2.0},
    ],
)
def test_nothing_keeps_reasoning_from_its_end(params: dict[str, Any]) -> None:
    going_on = make_seq([1, OPEN, 2], [3], **params)
    spent = make_seq([1, OPEN, 2], [3, 4], **params)
    closed = make_seq([1, OPEN, 2], [3, CLOSE, 4, 4, 4, 4], **params)
    first, second, third = sampled(going_on, spent, closed)
    assert second == CLOSE
    assert CLOSE not in (first, third)


def test_a_budget_of_nothing_ends_reasoning_at_once() -> None:
    assert sampled(make_seq([1, OPEN], thinking_token_budget=0)) == [CLOSE]
    assert sampled(make_seq([1], [OPEN], thinking_token_budget=0)) == [CLOSE]
    assert sampled(make_seq([1], thinking_token_budget=0)) == [2]


def test_a_draft_counts_as_far_as_it_goes_and_no_further() -> None:
    seq = make_seq([OPEN], [1])
    rows = [seq, DraftRow(seq, (2,)), DraftRow(seq, (2, 2)), DraftRow(seq, (2, CLOSE))]
    assert sampled(*rows) == [2, 2, CLOSE, 2]
    assert sampled(seq) == [2], "what was only guessed is not counted"
    seq.output_ids += [2, 2]
    assert sampled(seq) == [CLOSE]


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = [([OPEN], [1] * n, n % 3) for n in range(9)]

    def seqs() -> list[Sequence]:
        return [make_seq(p, o, thinking_token_budget=b, temperature=0.8) for p, o, b in rows]

    together = sampled(*seqs(), mode=LogprobsMode.PROCESSED)
    assert together == [sampled(seq, mode=LogprobsMode.PROCESSED)[0] for seq in seqs()]


def test_a_formed_answer_has_no_reasoning_to_be_ended() -> None:
    class Anything:
        has_ended = False

        def fill_mask(self, row: torch.Tensor) -> None:
            row.fill_(-1)

    seq = make_seq([OPEN], [1] * 9)
    seq.guide = Anything()  # type: ignore[assignment]  # more is not asked of it
    assert sampled(seq) == [2]


def test_a_model_without_such_reasoning_refuses_a_budget() -> None:
    params = SamplingParams(thinking_token_budget=9)
    with pytest.raises(InvalidRequest, match="thinking_token_budget: model 'm' has no") as refused:
        check_sampling(params, 3, CARD)
    assert refused.value.field == "params.thinking_token_budget"
    check_sampling(params, 3, CARD.model_copy(update={"reasoning_ids": tuple(MARKERS)}))
    check_sampling(SamplingParams(thinking_token_budget=-1), 3, CARD)


@pytest.mark.parametrize("wrong", [-2, 1.5, "3"])
def test_a_budget_is_a_number_of_tokens_or_minus_one(wrong: Any) -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with pytest.raises(InvalidRequest, match=r"^thinking_token_budget"):
        JobSpec([1], thinking_token_budget=wrong).draft("default")
    with pytest.raises(ValidationError, match="thinking_token_budget"):
        ChatRequest.model_validate({"messages": [], "thinking_token_budget": wrong})


def test_a_request_over_http_says_it_under_the_same_name() -> None:
    body = ChatRequest.model_validate({"messages": [], "thinking_token_budget": 0})
    assert job_options(body).get("thinking_token_budget") == 0
    with pytest.raises(InvalidRequest, match=r"^thinking_token_budget: .*beam search"):
        JobSpec([1], use_beam_search=True, thinking_token_budget=0).draft("default")


@pytest.mark.parametrize(
    ("added", "template", "found"),
    [
        (["<think>", "</think>"], "{{ '<think>' }}</think>", True),
        (["[THINK]", "[/THINK]"], "[THINK]", True),
        (["<think>", "</think>"], "{{ messages }}", False),
        (["<think>"], "<think></think>", False),
    ],
)
def test_the_markers_are_those_of_the_chat_template_if_each_is_a_token(
    added: list[str], template: str, *, found: bool
) -> None:
    raw = byte_level_tokenizer().raw
    raw.add_special_tokens(added)
    tokenizer = Tokenizer(TokenizerFiles(raw.to_str(), chat_template=template))
    size = raw.get_vocab_size()
    wanted = ReasoningMarkers(size - 2, size - 1) if found else None
    assert reasoning_markers(tokenizer, size) == wanted
    assert reasoning_markers(tokenizer, size - 1) is None, "the model lacks the last one"
