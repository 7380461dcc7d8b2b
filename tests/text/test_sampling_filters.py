"""Temperature and filters keep what the processors of transformers keep, in float64."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.sampler import Sampler

VOCAB = 1000
ROWS = 12


def drawn_from(logits: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
    """The logits that our sampler draws from, [rows, vocabulary]."""
    seen: list[torch.Tensor] = []

    def spy(
        logits: torch.Tensor, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(dim=1)

    seqs = [Sequence(str(row), [1, 2], params, seed=row) for row in range(len(logits))]
    Sampler(gumbel_argmax=spy).sample(logits, seqs)
    result: npt.NDArray[np.float64] = seen[0].double().numpy()
    return result


CASES: list[tuple[dict[str, Any], list[transformers.LogitsProcessor]]] = [
    ({"temperature": 0.37}, [transformers.TemperatureLogitsWarper(0.37)]),
    ({"top_k": 1}, [transformers.TopKLogitsWarper(1)]),
    ({"top_k": 40}, [transformers.TopKLogitsWarper(40)]),
    ({"top_p": 0.2}, [transformers.TopPLogitsWarper(0.2)]),
    ({"top_p": 0.93}, [transformers.TopPLogitsWarper(0.93)]),
    ({"min_p": 0.07}, [transformers.MinPLogitsWarper(0.07)]),
    # In vLLM's order, which is not the one of transformers' generate.
    (
        {"temperature": 1.6, "min_p": 0.01, "top_k": 50, "top_p": 0.9},
        [
            transformers.TemperatureLogitsWarper(1.6),
            transformers.MinPLogitsWarper(0.01),
            transformers.TopKLogitsWarper(50),
            transformers.TopPLogitsWarper(0.9),
        ],
    ),
]


@pytest.mark.parametrize(("values", "processors"), CASES, ids=[", ".join(v) for v, _ in CASES])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_what_is_drawn_from_is_what_transformers_leaves(
    values: dict[str, Any], processors: list[transformers.LogitsProcessor], scale: float
) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)) * scale
    wanted = logits.double()
    for processor in processors:
        wanted = processor(torch.zeros(ROWS, 1, dtype=torch.long), wanted)
    ours = drawn_from(logits, SamplingParams(**values))
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-6)


def test_bad_words_and_penalties_come_before_the_filters() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6)) * 3
    best = int(logits.argmax())
    params = SamplingParams(top_k=3, repetition_penalty=1.7)
    seq = Sequence("s", [1, best], params, seed=0, bad_word_ids=((7,),))
    scores = logits.double()
    for processor in (
        transformers.NoBadWordsLogitsProcessor([[7]], eos_token_id=VOCAB - 1),
        transformers.RepetitionPenaltyLogitsProcessor(1.7),
        transformers.TopKLogitsWarper(3),
    ):
        scores = processor(torch.tensor([[1, best]]), scores)
    tokens = {Sampler().sample(logits, [seq_of(seq, seed)])[0].id for seed in range(300)}
    assert tokens == set(scores.isfinite()[0].nonzero()[:, 0].tolist())


def seq_of(seq: Sequence, seed: int) -> Sequence:
    """The same sequence with another seed."""
    return Sequence("s", seq.prompt_ids, seq.params, seed=seed, bad_word_ids=seq.bad_word_ids)
