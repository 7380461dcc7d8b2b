"""Moves whole KV blocks: within the device, and to and from pinned host memory."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import torch

from tidemill_gpuworker.memory.block_copies import BlockCopies, BlockCopy
from tidemill_gpuworker.memory.kv_cache import KVCache


class BlockCopier:
    """Carries out the copies of a step on one KV cache, and owns the memory of the CPU tier.

    Every tensor of the cache is seen as rows of bytes, one row a block, so dtypes and shapes do not
    matter; a slot of the tier holds the rows of one block, one after another.

    On CUDA the way to and from the host is a stream of its own.  What leaves is gathered before the
    step may overwrite it and crosses while the step computes; the step waits for what comes in.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self._tensors = [_rows_of_bytes(tensor) for tensor in cache.tensors]
        self._widths = [rows.shape[1] for rows in self._tensors]
        self._device = self._tensors[0].device
        is_cuda = self._device.type == "cuda"
        # Named so because torch leaves the constructor without types.
        make_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make_stream(self._device) if is_cuda else None
        shape = (num_slots, sum(self._widths))
        self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=is_cuda and num_slots > 0)

    def run(self, copies: BlockCopies) -> None:
        """Make the copies, so that whatever the device does next sees their results."""
        if self._stream is None:
            self._move(copies)
            return
        current = torch.cuda.current_stream(self._device)
        # What the last step wrote must be there before it is read.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            leaving = self._gather(copies.outs)
            self._copy_forks(copies.forks)
            gathered = self._stream.record_event()
            self._put_in_slots(copies.outs, leaving)
            self._bring_in(copies.ins)
        if copies.ins:
            current.wait_stream(self._stream)
        else:
            current.wait_event(gathered)

    def _move(self, copies: BlockCopies) -> None:
        self._put_in_slots(copies.outs, self._gather(copies.outs))
        self._copy_forks(copies.forks)
        self._bring_in(copies.ins)

    def _gather(self, outs: tuple[BlockCopy, ...]) -> torch.Tensor | None:
        if not outs:
            return None
        blocks = self._index(copy.source for copy in outs)
        return torch.cat([rows.index_select(0, blocks) for rows in self._tensors], dim=1)

    def _put_in_slots(self, outs: tuple[BlockCopy, ...], leaving: torch.Tensor | None) -> None:
        if leaving is not None:
            for copy, row in zip(outs, leaving, strict=True):
                self._slots[copy.target].copy_(row, non_blocking=True)

    def _copy_forks(self, forks: tuple[BlockCopy, ...]) -> None:
        if not forks:
            return
        sources = self._index(copy.source for copy in forks)
        targets = self._index(copy.target for copy in forks)
        for rows in self._tensors:
            rows.index_copy_(0, targets, rows.index_select(0, sources))

    def _bring_in(self, ins: tuple[BlockCopy, ...]) -> None:
        if not ins:
            return
        coming = torch.empty((len(ins), sum(self._widths)), dtype=torch.uint8, device=self._device)
        for copy, row in zip(ins, coming, strict=True):
            row.copy_(self._slots[copy.source], non_blocking=True)
        blocks = self._index(copy.target for copy in ins)
        borders = pairwise(accumulate(self._widths, initial=0))
        for rows, (start, end) in zip(self._tensors, borders, strict=True):
            rows.index_copy_(0, blocks, coming[:, start:end])

    def _index(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._device)


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)
