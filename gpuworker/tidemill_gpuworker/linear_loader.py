"""The linear layers of a checkpoint, whatever form their weights are stored in."""

from collections.abc import Sequence

from tidemill_gpuworker.linear import Linear, make_linear
from tidemill_gpuworker.loader import Checkpoint


def load_linear(
    checkpoint: Checkpoint,
    names: Sequence[str],
    rows: Sequence[int],
    in_features: int,
    *,
    with_bias: bool = False,
) -> Linear:
    """Return the layers called ``names``, which share their input, as one.

    Its output is theirs side by side; ``rows`` are their output features.  Raises as
    ``Checkpoint.stacked`` does.
    """
    weight = checkpoint.stacked([f"{name}.weight" for name in names], rows, in_features)
    bias = checkpoint.stacked([f"{name}.bias" for name in names], rows) if with_bias else None
    return make_linear(weight, bias)
