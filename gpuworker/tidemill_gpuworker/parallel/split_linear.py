"""Linear layers of which each rank holds a part (Megatron-LM, arXiv 1909.08053)."""

from collections.abc import Sequence

import torch

from tidemill_gpuworker.loading.linear_loader import load_linear
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.models.linear import Linear, make_linear
from tidemill_gpuworker.parallel.shard import Section, Shard


def load_columns(
    checkpoint: Checkpoint,
    names: Sequence[str],
    sections: Sequence[Section],
    in_features: int,
    *,
    with_bias: bool = False,
) -> Linear:
    """Return layers that share their input as one, of each the output features of this rank.

    There is a section for each name; or there is one name, whose tensor holds all of them.  Raises
    as ``load_linear`` does.
    """
    if all(section.shard.is_whole for section in sections):
        rows = [section.size for section in sections]
        rows = [sum(rows)] if len(names) == 1 else rows
        return load_linear(checkpoint, names, rows, in_features, with_bias=with_bias)

    def load(kind: str, *rest: int) -> torch.Tensor:
        if len(names) == 1:
            return checkpoint.part(f"{names[0]}.{kind}", 0, sections, *rest)
        pairs = zip(names, sections, strict=True)
        return torch.cat(
            [checkpoint.part(f"{name}.{kind}", 0, [section], *rest) for name, section in pairs]
        )

    return make_linear(load("weight", in_features), load("bias") if with_bias else None)


def load_rows(
    checkpoint: Checkpoint,
    name: str,
    out_features: int,
    in_features: int,
    shard: Shard,
    *,
    with_bias: bool = False,
) -> Linear:
    """Return the layer for this rank's part of the input; the outputs of all ranks add up.

    ``in_features`` is the size of the part.  Raises as ``load_linear`` does.
    """
    if shard.is_whole:
        return load_linear(checkpoint, [name], [out_features], in_features, with_bias=with_bias)
    weight = checkpoint.part(f"{name}.weight", 1, [Section(in_features, shard)], out_features)
    bias = checkpoint.tensor(f"{name}.bias", out_features) if with_bias else None
    # Added once, by one rank.
    return make_linear(weight, None if shard.index else bias)
