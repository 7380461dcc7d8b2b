"""Puts quantised weights that share their input on top of each other."""

from collections.abc import Sequence

import torch

from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight
from tidemill_kernels.packed_weight import PackedWeight


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return one weight with the rows of all, None where they differ in more than that."""
    if len(weights) == 1:
        return weights[0]
    if any(weight.outliers is not None for weight in weights):
        return None
    parts = [weight.packed for weight in weights]
    if not all(_fits(parts[0], part) for part in parts[1:]):
        return None
    first = parts[0]
    packed = PackedWeight(
        first.kind,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        first.group_size,
        zeros=_cat([part.zeros for part in parts]),
        table=_tables(parts),
        order=first.order,
    )
    return QuantizedWeight(packed)


def _fits(first: PackedWeight, other: PackedWeight) -> bool:
    return (
        first.kind is other.kind
        and first.group_size == other.group_size
        and (first.zeros is None) == (other.zeros is None)
        and _same(first.order, other.order)
    )


def _same(first: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if first is None or other is None:
        return first is other
    return torch.equal(first, other)


def _cat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _tables(parts: Sequence[PackedWeight]) -> torch.Tensor | None:
    tables = [part.table for part in parts]
    if all(_same(tables[0], table) and (table is None or len(table) == 1) for table in tables):
        return tables[0]
    rows = [part.out_features for part in parts]
    return _cat(
        [t if t is None else t.expand(count, -1) for t, count in zip(tables, rows, strict=True)]
    )
