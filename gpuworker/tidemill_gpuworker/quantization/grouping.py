"""Inputs whose groups are not neighbours."""

import torch

from tidemill_gpuworker.quantization.stored_layer import StoredLayer


def inputs_by_group(layer: StoredLayer, group_of: torch.Tensor, size: int) -> torch.Tensor | None:
    """Return int64 [in_features], the inputs in the order of their groups.

    None if they are in that order already. ``group_of`` [in_features] is each input's group. Raises
    DamagedModel unless all groups have ``size`` inputs, but for a shorter last one.
    """
    in_order = torch.arange(layer.in_features) // size
    if torch.equal(group_of, in_order):
        return None
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order], in_order):
        raise layer.damaged(f"its g_idx does not divide the inputs into groups of {size}")
    return order
