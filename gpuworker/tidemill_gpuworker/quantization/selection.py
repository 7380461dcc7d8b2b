"""Decides how a model is quantised: by its files, or as asked on the command line."""

from pathlib import Path

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.loading.config_fields import read_config
from tidemill_gpuworker.quantization.config_reader import read_scheme
from tidemill_gpuworker.quantization.on_the_fly import ON_THE_FLY, OnTheFly
from tidemill_gpuworker.quantization.scheme import QuantScheme


def choose_quantization(model_dir: Path, wanted: str | None) -> QuantScheme | OnTheFly | None:
    """Return how the model in ``model_dir`` is quantised, None if it is not.

    ``wanted`` is the method it must be stored in; a model that is stored plainly is quantised while
    it is loaded.

    Raises:
        ConfigError: the model is stored otherwise than ``wanted``, or not quantised at all.
        DamagedModel: ``quantization_config`` has a value of the wrong kind.
        UnsupportedModel: it asks for something that is not read.
    """
    scheme = read_scheme(read_config(model_dir), model_dir / "config.json")
    if wanted is None or (scheme is not None and scheme.method == wanted):
        return scheme
    if scheme is not None:
        raise ConfigError(
            f"quantization {wanted!r}: {model_dir} is quantised by {scheme.method}",
            fix="Leave out --quantization; the model's own is found.",
        )
    for method in ON_THE_FLY:
        if wanted == method:
            return OnTheFly(method)
    raise ConfigError(
        f"quantization {wanted!r}: {model_dir} is not quantised",
        fix=f"Choose one of {', '.join(ON_THE_FLY)}, which are made while a model is loaded.",
    )
