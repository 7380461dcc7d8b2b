"""Logprobs against float64, their order among ties, and what bounds them."""

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.protocol.codec import decode, encode
from tidemill.protocol.logprobs import LEAST_LOGPROB, TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.logprobs import Wanted, read_logprobs
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.sampling.sampler import LogprobsMode, Sampler

VOCAB = 64


def random_logits(rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def make_seq(**params: Any) -> Sequence:
    return Sequence("s", [1, 2], SamplingParams(**params), seed=4)


def sample(
    logits: torch.Tensor, seqs: Several[Sequence], mode: LogprobsMode = LogprobsMode.RAW
) -> list[SampledToken]:
    return Sampler(logprobs_mode=mode).sample(logits, seqs)


def told(token: SampledToken) -> TokenLogprobs:
    assert token.logprobs is not None
    return token.logprobs


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_top=st.sampled_from([0, 1, 5, VOCAB, VOCAB + 9, -1]),
    is_coarse=st.booleans(),
)
def test_logprobs_are_those_of_a_float64_reference(
    seed: int, num_top: int, is_coarse: bool
) -> None:
    logits = random_logits(3, seed=seed)
    if is_coarse:  # many ties, as in bfloat16
        logits = logits.round()
    ids = torch.tensor([seed % VOCAB, 0, VOCAB - 1])
    wanted = logits.double().log_softmax(dim=1).numpy()
    for row, found in enumerate(read_logprobs(logits, ids, [Wanted(num_top)] * 3)):
        # A stable sort leaves the lower id first among equals.
        order = np.argsort(-logits[row].numpy(), kind="stable")
        num = VOCAB if num_top == -1 else min(num_top, VOCAB)
        assert [token for token, _ in found.top] == order[:num].tolist()
        np.testing.assert_allclose(
            [value for _, value in found.top], wanted[row][order[:num]], atol=1e-5
        )
        assert found.rank == order.tolist().index(int(ids[row])) + 1
        assert found.logprob == pytest.approx(wanted[row][ids[row]], abs=1e-5)


def test_the_likeliest_of_a_greedy_token_has_its_very_logprob() -> None:
    logits = random_logits(50).round()
    for token in sample(logits, [make_seq(temperature=0.0, logprobs=5) for _ in range(50)]):
        logprobs = told(token)
        assert logprobs.top[0] == (token.id, logprobs.logprob)
        assert logprobs.rank == 1


def test_rows_get_what_each_of_them_asked_for() -> None:
    logits = random_logits(4)
    seqs = [
        make_seq(logprobs=2),
        make_seq(),
        make_seq(logprobs=0, logprob_token_ids=[9, 3]),
        make_seq(temperature=0.0, logprobs=7),
    ]
    first, second, third, fourth = sample(logits, seqs)
    assert len(told(first).top) == 2 and len(told(fourth).top) == 7
    assert second.logprobs is None
    wanted = logits.double().log_softmax(dim=1)[2]
    assert told(third).top == ()
    assert [token for token, _ in told(third).asked] == [9, 3]
    assert [value for _, value in told(third).asked] == pytest.approx(
        [wanted[9].item(), wanted[3].item()], abs=1e-5
    )


def test_raw_logprobs_are_of_the_logits_before_anything_was_done_to_them() -> None:
    logits = random_logits(1)
    seq = make_seq(logprobs=3, temperature=0.3, top_k=2, logit_bias={5: 50.0})
    [token] = sample(logits, [seq])
    assert token.id == 5
    plain = logits.double().log_softmax(dim=1)[0]
    assert told(token).logprob == pytest.approx(plain[5].item(), abs=1e-5)
    assert told(token).top[0][0] == int(plain.argmax())


def test_processed_logprobs_are_of_what_the_token_was_drawn_from() -> None:
    logits = random_logits(3)
    seqs = [
        make_seq(logprobs=4, temperature=0.5, top_k=3),
        make_seq(logprobs=4, temperature=0.0, allowed_token_ids=[7, 8]),
        make_seq(temperature=1.0),
    ]
    drawn, greedy, _ = sample(logits, seqs, LogprobsMode.PROCESSED)
    likeliest = logits[0].double().topk(3)
    wanted = (likeliest.values / 0.5).log_softmax(dim=0).tolist()
    *kept, (_, nothing) = told(drawn).top
    assert [token for token, _ in kept] == likeliest.indices.tolist()
    assert [value for _, value in kept] == pytest.approx(wanted, abs=1e-5)
    assert nothing == LEAST_LOGPROB
    assert {token for token, _ in told(greedy).top[:2]} == {7, 8}
    assert told(greedy).top[2][1] == LEAST_LOGPROB


def test_what_the_sampler_tells_survives_the_wire() -> None:
    seq = make_seq(logprobs=-1, logprob_token_ids=[3], allowed_token_ids=[3])
    for mode in LogprobsMode:
        [token] = sample(random_logits(1), [seq], mode)
        assert decode(encode(told(token)), TokenLogprobs) == told(token)


def test_logits_without_a_distribution_are_an_error() -> None:
    logits = random_logits(1)
    logits[0, 3] = float("nan")
    with pytest.raises(ArithmeticError):
        read_logprobs(logits, torch.tensor([0]), [Wanted(1)])
