"""Refuses what does not run on several ranks, before any is started."""

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.loading.loader import Quantization
from tidemill_gpuworker.loading.model_choice import ModelSource, NativeSource
from tidemill_gpuworker.parallel.shard import Place
from tidemill_gpuworker.parallel.split_config import check_split

_FIX = "Leave out --tensor-parallel-size and --pipeline-parallel-size."


def check_parallel(source: ModelSource, quantization: Quantization | None, place: Place) -> None:
    """Raise unless the model can be split as ``place`` is a part of it.

    Raises:
        ConfigError: its sizes cannot be divided so.
        UnsupportedModel: it runs on transformers, is quantised, or computes over all heads at once.
    """
    if place.is_whole:
        return
    if not isinstance(source, NativeSource):
        raise UnsupportedModel(
            f"{source.model_config.architecture} runs on transformers, which is not split over"
            " several ranks",
            fix=_FIX,
        )
    if quantization is not None:
        raise UnsupportedModel(
            f"weights quantised by {quantization.method} are not split over several ranks",
            fix=f"{_FIX} Or use the unquantised model.",
        )
    check_split(source.model_config, place.tensor.count, place.stage.count)
