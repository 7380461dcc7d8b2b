"""Holds what the engine generated against transformers."""

from collections.abc import Sequence

import torch
import transformers

from support.golden_models import ATOL, VOCAB_SIZE
from support.greedy import GreedyRun, reference_logits


def make_prompts(lengths: Sequence[int], shared: int) -> list[list[int]]:
    """Random prompts; the last two begin with ``shared`` tokens of the longest."""
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    prefix = max(draw, key=len)[:shared]
    return [*draw, prefix + draw[0], prefix + draw[1]]


def check_run(
    model: transformers.PreTrainedModel,
    prompts: list[list[int]],
    run: GreedyRun,
    atol: float = ATOL,
) -> float:
    """Assert that each token is transformers' choice after the same tokens; return the error."""
    worst = 0.0
    for prompt, output, logits in zip(prompts, run.outputs, run.logits, strict=True):
        expected = reference_logits(model, prompt, output)
        assert output == expected.argmax(dim=-1).tolist()
        torch.testing.assert_close(logits, expected, atol=atol, rtol=0.0)
        worst = max(worst, float((logits - expected).abs().max()))
    return worst
