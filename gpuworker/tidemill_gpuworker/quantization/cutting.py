"""Cuts the part of one rank out of a quantised weight."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import torch

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.parallel.linear_part import LinearPart, ranges_of
from tidemill_gpuworker.parallel.shard import Section
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight
from tidemill_kernels.packed_weight import PackedWeight


def cut_weight(weight: QuantizedWeight, part: LinearPart) -> QuantizedWeight:
    """Return the part of the weight of one layer, as exact as the whole.

    Raises:
        UnsupportedModel: the inputs of the part are packed together with others.
    """
    if part.is_whole:
        return weight
    if not part.inputs.shard.is_whole:
        weight = _cut_inputs(weight, part.names[0], part.inputs)
    rows = ranges_of(part.outputs[0])
    return weight if part.rows == part.whole_rows else _cut_outputs(weight, rows)


def _cut_outputs(weight: QuantizedWeight, rows: Sequence[slice]) -> QuantizedWeight:
    packed = weight.packed
    table = packed.table
    cut = replace(
        packed,
        codes=_take(packed.codes, rows),
        scales=_take(packed.scales, rows),
        zeros=None if packed.zeros is None else _take(packed.zeros, rows),
        table=table if table is None or len(table) == 1 else _take(table, rows),
    )
    return QuantizedWeight(cut, _select(weight.outliers, 0, rows))


def _cut_inputs(weight: QuantizedWeight, name: str, section: Section) -> QuantizedWeight:
    packed, size = weight.packed, section.size
    columns = slice(section.start, section.start + size)
    per_byte = packed.kind.per_byte
    if size % per_byte:
        raise _inseparable(name, f"{size} inputs of a rank are no whole number of bytes")
    has_one_group = packed.scales.shape[1] == 1
    # A group that reaches into the next part is taken for several with the same scale.
    group_size = size if has_one_group else gcd(packed.group_size, size)

    def by_group(numbers: torch.Tensor) -> torch.Tensor:
        if has_one_group:
            return numbers
        finer = numbers.repeat_interleave(packed.group_size // group_size, dim=1)
        return finer[:, columns.start // group_size : columns.stop // group_size].contiguous()

    cut = PackedWeight(
        packed.kind,
        packed.codes[:, columns.start // per_byte : columns.stop // per_byte].contiguous(),
        by_group(packed.scales),
        group_size,
        zeros=None if packed.zeros is None else by_group(packed.zeros),
        table=packed.table,
        order=_cut_order(packed.order, name, section),
    )
    return QuantizedWeight(cut, _select(weight.outliers, 1, [columns]))


def _cut_order(order: torch.Tensor | None, name: str, section: Section) -> torch.Tensor | None:
    if order is None:
        return None
    part = order.narrow(0, section.start, section.size) - section.start
    if part.min() < 0 or part.max() >= section.size:
        raise _inseparable(
            name, "its groups are of inputs in the order of activations (desc_act), across ranks"
        )
    return part


def _take(tensor: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    return torch.cat([tensor[each] for each in rows])


def _select(
    outliers: torch.Tensor | None, dim: int, ranges: Sequence[slice]
) -> torch.Tensor | None:
    if outliers is None:
        return None
    places = torch.cat([torch.arange(each.start, each.stop) for each in ranges])
    return torch.index_select(outliers, dim, places).coalesce()


def _inseparable(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} cannot be split over several ranks: {reason}",
        fix="Leave out --tensor-parallel-size, or use another quantisation of the model.",
    )
