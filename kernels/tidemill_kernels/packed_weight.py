"""One layout for every weight of 4 or 8 bits, and what its bytes mean.

A weight is ``value(code) * scale`` or ``(value(code) - zero) * scale``, where scale and zero belong
to a row and a group of neighbouring columns. All integer formats, fp8 and tables of 16 values are
brought into this layout when a model is loaded, so that one kernel computes them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

#: Scratch that products may take for weights in plain form.
_MAX_SCRATCH_BYTES = 16 << 20


class CodeKind(IntEnum):
    """What a code stands for; codes of 4 bits come in pairs, the first in the lower half."""

    INT4 = 0
    INT8 = 1
    #: float8_e4m3fn.
    FP8 = 2
    #: An index into a table of 16 values.
    TABLE4 = 3

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 2 if self in (CodeKind.INT4, CodeKind.TABLE4) else 1


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised weight [out_features, in_features].

    Attributes:
        kind: what the codes stand for.
        codes: uint8 [out_features, in_features / codes per byte].
        scales: float [out_features, groups].
        group_size: columns of a group; the last may have fewer.
        zeros: float [out_features, groups], taken off the codes; None for none.
        table: float32 [1 or out_features, 16] for ``TABLE4``.
        order: int64 [in_features], the input that each column belongs to; None if they are in
            order.
    """

    kind: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1] * self.kind.per_byte

    @property
    def num_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

    def to(self, device: torch.device) -> "PackedWeight":
        """Return the same weight on ``device``."""
        moved = [None if t is None else t.to(device).contiguous() for t in self._tensors()]
        codes, scales, zeros, table, order = moved
        assert codes is not None
        assert scales is not None
        return PackedWeight(self.kind, codes, scales, self.group_size, zeros, table, order)

    def dequantise(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return some rows as float32 [rows, in_features], columns in the order of ``order``."""
        rows = slice(start, stop)
        values = self._values(rows)
        size = self.group_size
        if self.in_features % size:
            # Groups of one size but for the last: apart, as their columns form no array.
            whole = self.in_features - self.in_features % size
            self._scale(values[:, :whole], rows, slice(0, -1), size)
            self._scale(values[:, whole:], rows, slice(-1, None), self.in_features - whole)
        else:
            self._scale(values, rows, slice(None), size)
        return values

    def in_input_order(self) -> torch.Tensor:
        """Return all of it as float32 [out_features, in_features], columns as the inputs are."""
        weight = self.dequantise()
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.codes, self.scales, self.zeros, self.table, self.order

    def _values(self, rows: slice) -> torch.Tensor:
        codes = self.codes[rows]
        if self.kind is CodeKind.FP8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.kind is CodeKind.INT8:
            return codes.float()
        if self.table is not None and len(self.table) > 1:
            return self.table[rows].gather(1, unpack_nibbles(codes).long())
        # A byte is looked up as the two values that it stands for.
        values = torch.arange(16.0, device=codes.device) if self.table is None else self.table[0]
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
        return pairs.index_select(0, codes.flatten().int()).view(len(codes), -1)

    def _scale(self, values: torch.Tensor, rows: slice, groups: slice, size: int) -> None:
        """Turn the values of some groups of ``size`` columns into weights, in place."""
        grouped = values.view(len(values), -1, size)
        if self.zeros is not None:
            grouped -= self.zeros[rows, groups, None].float()
        grouped *= self.scales[rows, groups, None].float()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 [rows, n / 2] of codes below 16, uint8 [rows, n] with n even."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes [rows, 2 n] that ``pack_nibbles`` packed into [rows, n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def row_blocks(out_features: int, in_features: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows whose float32 form is of bounded size."""
    step = max(1, _MAX_SCRATCH_BYTES // (4 * in_features))
    for start in range(0, out_features, step):
        yield start, min(out_features, start + step)


def multiply(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return ``x @ weight.T`` [rows, out_features] in x's dtype, in plain torch.

    The weight is made plain a few rows at a time.  ``x`` is [rows, in_features] with its columns
    in the order of ``weight.order``.
    """
    out = x.new_empty(x.shape[0], weight.out_features)
    for start, stop in row_blocks(weight.out_features, weight.in_features):
        out[:, start:stop] = x @ weight.dequantise(start, stop).to(x.dtype).T
    return out
