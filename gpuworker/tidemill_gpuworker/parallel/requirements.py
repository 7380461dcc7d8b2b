"""Refuses what does not run on several ranks, before any is started."""

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.loading.loader import Quantization
from tidemill_gpuworker.parallel.shard import Place

_FIX = "Leave out --tensor-parallel-size and --pipeline-parallel-size."


def check_parallel(quantization: Quantization | None, place: Place) -> None:
    """Raise ``UnsupportedModel`` unless a model stored so can be split as ``place`` is a part."""
    if place.is_whole or quantization is None:
        return
    raise UnsupportedModel(
        f"weights quantised by {quantization.method} are not split over several ranks",
        fix=f"{_FIX} Or use the unquantised model.",
    )
