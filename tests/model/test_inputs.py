"""How a step plan is laid out as tensors."""

import torch

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.inputs import make_inputs
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

CPU = torch.device("cpu")


def make_seq(prompt: list[int], blocks: list[int], output: list[int] | None = None) -> Sequence:
    seq = Sequence("seq", prompt, SamplingParams(), seed=0, output_ids=output or [])
    seq.block_table = blocks
    return seq


def make_plan() -> StepPlan:
    """A decode, a chunk that reaches the end of its prompt and one that does not; blocks of 4."""
    decode = make_seq([10, 11, 12, 13], [7, 2], output=[14, 15])
    last_chunk = make_seq([20, 21, 22, 23, 24], [5, 1])
    first_chunk = make_seq(list(range(30, 50)), [9, 3, 4])
    return StepPlan(
        (
            ScheduledSequence(decode, start=5, num_tokens=1),
            ScheduledSequence(last_chunk, start=2, num_tokens=3),
            ScheduledSequence(first_chunk, start=0, num_tokens=6),
        )
    )


def test_tokens_of_all_sequences_stand_one_after_another() -> None:
    inputs = make_inputs(make_plan(), 4, CPU)
    assert inputs.token_ids.tolist() == [15, 22, 23, 24, 30, 31, 32, 33, 34, 35]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert inputs.metadata.cu_seqlens_q.tolist() == [0, 1, 4, 10]


def test_each_token_gets_the_slot_that_its_block_table_says() -> None:
    slots = make_inputs(make_plan(), 4, CPU).slot_mapping
    assert slots.tolist() == [2 * 4 + 1, 22, 23, 4, 36, 37, 38, 39, 12, 13]
    assert slots.dtype == torch.int64


def test_only_rows_at_the_end_of_the_known_tokens_are_sampled() -> None:
    assert make_inputs(make_plan(), 4, CPU).sampled_rows.tolist() == [0, 3]


def test_the_kernels_learn_the_context_of_each_sequence() -> None:
    metadata = make_inputs(make_plan(), 4, CPU).metadata
    assert metadata.seq_lens.tolist() == [6, 5, 6]
    assert (metadata.max_seqlen_q, metadata.max_seq_len, metadata.num_decodes) == (6, 6, 1)
    # Blocks beyond this step's context, like the third one's last, are of no interest.
    assert metadata.block_tables.tolist() == [[7, 2], [5, 1], [9, 3]]


def test_a_plan_in_which_nothing_is_sampled_has_no_sampled_rows() -> None:
    seq = make_seq(list(range(10)), [0, 1, 2])
    inputs = make_inputs(StepPlan((ScheduledSequence(seq, 0, 5),)), 4, CPU)
    assert inputs.sampled_rows.tolist() == []
