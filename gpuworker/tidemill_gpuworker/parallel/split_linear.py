"""Linear layers of which each rank holds a part (Megatron-LM, arXiv 1909.08053)."""

from collections.abc import Sequence

from tidemill_gpuworker.loading.linear_loader import load_part
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.models.linear import Linear
from tidemill_gpuworker.parallel.linear_part import LinearPart
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
    as ``load_part`` does.
    """
    outputs = [tuple(sections)] if len(names) == 1 else [(section,) for section in sections]
    part = LinearPart(tuple(names), tuple(outputs), Section(in_features))
    return load_part(checkpoint, part, with_bias=with_bias)


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

    ``in_features`` is the size of the part.  Raises as ``load_part`` does.
    """
    part = LinearPart((name,), ((Section(out_features),),), Section(in_features, shard))
    return load_part(checkpoint, part, with_bias=with_bias)
