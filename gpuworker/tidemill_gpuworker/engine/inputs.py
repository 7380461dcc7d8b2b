"""From a step plan to the tensors that the model and the attention kernels take."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_kernels import AttentionMetadata

_Ints = npt.NDArray[np.int64]
_Tables = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as a flat batch: the scheduled tokens of all sequences, one after another.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens]; each token's place in its sequence.
        slot_mapping: int64 [tokens]; block * block_size + offset of each token's cache slot.
        sampled_rows: int64 [rows]; rows whose next token is wanted: of each item of
            ``plan.sampling`` that of its last known token and those of its draft.
        metadata: where each sequence's tokens and blocks are.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sampled_rows: torch.Tensor
    metadata: AttentionMetadata


def make_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """Lay out the tokens of a plan that schedules at least one."""
    scheduled = plan.scheduled
    starts = np.fromiter((item.start for item in scheduled), np.int64, len(scheduled))
    lengths = np.fromiter((item.num_tokens for item in scheduled), np.int64, len(scheduled))
    ends = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    tables = _block_tables(scheduled, block_size)
    return StepInputs(
        token_ids=_tensor(_token_ids(scheduled), device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(_slots(tables, positions, lengths, block_size), device),
        sampled_rows=_tensor(_sampled_rows(scheduled, ends[1:]), device),
        metadata=_metadata(plan, tables, starts + lengths, ends, device),
    )


def _token_ids(scheduled: tuple[ScheduledSequence, ...]) -> _Ints:
    ids: list[int] = []
    for item in scheduled:
        ids += item.token_ids
    return np.array(ids, np.int64)


def _sampled_rows(scheduled: tuple[ScheduledSequence, ...], ends: _Ints) -> _Ints:
    counts = np.fromiter(
        (item.samples * (1 + len(item.draft)) for item in scheduled), np.int64, len(scheduled)
    )
    # Of each sequence as many rows as it samples, up to its last one.
    behind = np.cumsum(counts)
    return np.arange(behind[-1]) + np.repeat(ends - behind, counts)


def _block_tables(scheduled: tuple[ScheduledSequence, ...], block_size: int) -> _Tables:
    counts = [-(-item.end // block_size) for item in scheduled]
    tables = np.zeros((len(scheduled), max(counts)), np.int32)
    for row, item, count in zip(tables, scheduled, counts, strict=True):
        row[:count] = item.seq.block_table[:count]
        if num_null := item.seq.num_null_blocks:
            # Never read; yet what a kernel reads and masks must be numbers.
            row[:num_null] = row[num_null]
    return tables


def _slots(tables: _Tables, positions: _Ints, lengths: _Ints, block_size: int) -> _Ints:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    blocks = tables[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _metadata(
    plan: StepPlan,
    tables: _Tables,
    seq_lens: _Ints,
    ends: _Ints,
    device: torch.device,
) -> AttentionMetadata:
    return AttentionMetadata(
        block_tables=_tensor(tables, device),
        seq_lens=_tensor(seq_lens.astype(np.int32), device),
        cu_seqlens_q=_tensor(ends.astype(np.int32), device),
        max_seqlen_q=int(np.diff(ends).max()),
        max_seq_len=int(seq_lens.max()),
        num_decodes=plan.num_decodes,
    )


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
