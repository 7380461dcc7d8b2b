"""The shape of what one rank computes, and the models that cannot be split so."""

from collections.abc import Callable
from dataclasses import replace

from tidemill.protocol.errors import ConfigError, UnsupportedModel
from tidemill_gpuworker.loading.layer_config import MoeConfig
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.parallel.shard import Place, Shard


def check_split(config: ModelConfig, tensor_size: int, num_stages: int) -> None:
    """Raise unless the model can be split into so many parts and stages.

    Raises:
        ConfigError: a size is no multiple of ``tensor_size``, or there are too few layers.
        UnsupportedModel: the family computes something over all heads at once.
    """
    for name, size in _split_sizes(config).items():
        if size % tensor_size:
            raise indivisible(name, size, tensor_size)
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % tensor_size and tensor_size % num_kv_heads:
        raise indivisible("num_key_value_heads", num_kv_heads, tensor_size)
    if num_stages > config.num_layers:
        raise ConfigError(
            f"a model of {config.num_layers} layers has no {num_stages} pipeline stages",
            fix="Lower --pipeline-parallel-size.",
        )
    if tensor_size > 1 and FAMILIES[config.architecture].qk_norm == "projection":
        raise UnsupportedModel(
            f"{config.architecture} normalises all heads together, which does not run with"
            " tensor parallelism",
            fix="Leave out --tensor-parallel-size; --pipeline-parallel-size splits it by layers.",
        )


def split_config(config: ModelConfig, place: Place) -> ModelConfig:
    """Return the config of a rank's part: heads, inner sizes and layers are those it holds."""
    if place.is_whole:
        return config
    tensor = place.tensor
    heads = _kv_shard(config, tensor)
    layers = layers_of(config.num_layers, place.stage)
    return replace(
        config,
        num_heads=config.num_heads // tensor.count,
        num_kv_heads=config.num_kv_heads // heads.count,
        intermediate_size=config.intermediate_size // tensor.count,
        moe=_split_moe(config.moe, tensor.count),
        layers=config.layers[layers.start : layers.stop],
        num_layers=len(layers),
        first_layer=layers.start,
        shard=tensor,
        kv_shard=heads,
    )


def layers_of(num_layers: int, stage: Shard) -> range:
    """Return the layers of a stage; the first ones, which do more, have the fewer layers."""
    borders = [num_layers * number // stage.count for number in range(stage.count + 1)]
    return range(borders[stage.index], borders[stage.index + 1])


def largest_part(split: Callable[[Place], ModelConfig], place: Place) -> ModelConfig:
    """Return the config of the part with the most KV per token, of those ``place`` is one of.

    ``split`` returns the config of a part, as ``split_config`` does.
    """
    stages = [Shard(number, place.stage.count) for number in range(place.stage.count)]
    parts = [split(replace(place, stage=stage)) for stage in stages]
    return max(parts, key=lambda part: part.kv_elements_per_token)


def _kv_shard(config: ModelConfig, tensor: Shard) -> Shard:
    # Where there are fewer heads than ranks, neighbours hold the same one.
    count = min(tensor.count, config.num_kv_heads)
    return Shard(tensor.index * count // tensor.count, count)


def _split_moe(moe: MoeConfig | None, count: int) -> MoeConfig | None:
    if moe is None:
        return None
    return replace(
        moe,
        intermediate_size=moe.intermediate_size // count,
        shared_intermediate_size=moe.shared_intermediate_size // count,
    )


def _split_sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {"num_attention_heads": config.num_heads}
    if not all(layer.is_sparse for layer in config.layers):
        sizes["intermediate_size"] = config.intermediate_size
    if config.moe is not None:
        sizes["the inner size of the experts"] = config.moe.intermediate_size
        sizes["the inner size of the shared expert"] = config.moe.shared_intermediate_size
    return sizes


def indivisible(name: str, size: int, tensor_size: int) -> ConfigError:
    """Return the error for a size that so many ranks cannot share."""
    return ConfigError(
        f"--tensor-parallel-size {tensor_size} does not divide {name} {size} of this model",
        fix="Choose a divisor.",
    )
