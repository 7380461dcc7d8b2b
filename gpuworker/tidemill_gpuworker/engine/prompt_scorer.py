"""Reads the logprobs of prompts from the hidden states of a step."""

from collections.abc import Callable

import torch

from tidemill_gpuworker.sampling.logprobs import Wanted, read_logprobs
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

#: Logits are made for so many rows that they, and the sort keys beside them, stay below 64 MiB.
_MAX_LOGITS = 8 << 20


def score_prompts(
    plan: StepPlan,
    hidden: torch.Tensor,
    make_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> None:
    """Extend ``prompt_logprobs`` of the plan's sequences whose jobs asked for them.

    ``hidden`` is [plan.num_tokens, hidden]; ``make_logits`` turns rows of it into float32 logits
    [rows, vocab_size].  What a sequence knows already, from before a preemption or a step that
    failed, is not computed again.
    """
    first_row = 0
    for item in plan.scheduled:
        if item.seq.lacks_prompt_logprobs:
            rows = hidden[first_row : first_row + item.num_tokens]
            _score(item, rows, make_logits, max(1, _MAX_LOGITS // vocab_size))
        first_row += item.num_tokens


def _score(
    item: ScheduledSequence,
    hidden: torch.Tensor,
    make_logits: Callable[[torch.Tensor], torch.Tensor],
    max_rows: int,
) -> None:
    seq = item.seq
    known = seq.prompt_logprobs
    assert item.start <= max(0, len(known) - 1), f"{seq.seq_id} skipped tokens of its prompt"
    if not known:
        known.append(None)
    # Position p tells of token p + 1.
    end = min(item.end, seq.num_prompt_tokens - 1)
    wanted = Wanted(seq.params.prompt_logprobs or 0)
    for start in range(len(known) - 1, end, max_rows):
        stop = min(end, start + max_rows)
        logits = make_logits(hidden[start - item.start : stop - item.start])
        ids = torch.tensor(seq.prompt_ids[start + 1 : stop + 1], device=logits.device)
        known += read_logprobs(logits, ids, [wanted] * (stop - start))
