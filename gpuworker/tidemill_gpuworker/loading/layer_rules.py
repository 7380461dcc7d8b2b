"""Rules of config.json files about which layers do something."""

from collections.abc import Callable

from tidemill_gpuworker.loading.config_fields import ConfigFields

#: Whether something holds for the layer of that index; raises DamagedModel for a wrong field.
LayerRule = Callable[[ConfigFields, int], bool]


def never(config: ConfigFields, index: int) -> bool:
    """Hold for no layer."""
    return False


def always(config: ConfigFields, index: int) -> bool:
    """Hold for every layer."""
    return True


def even(config: ConfigFields, index: int) -> bool:
    """Hold for the first layer and every other one after it."""
    return index % 2 == 0


def not_every_fourth(config: ConfigFields, index: int) -> bool:
    """Hold for three layers of every four."""
    return (index + 1) % 4 != 0


def from_max_window_layers(config: ConfigFields, index: int) -> bool:
    """Hold from layer `max_window_layers` on."""
    return index >= config.count("max_window_layers")


def even_below_max_window_layers(config: ConfigFields, index: int) -> bool:
    """Hold for every other layer below `max_window_layers`."""
    return index % 2 == 0 and index < config.count("max_window_layers")


def not_last_of_pattern(config: ConfigFields, index: int) -> bool:
    """Hold for all but the last layer of each `sliding_window_pattern`."""
    name = "sliding_window_pattern"
    return (index + 1) % config.size(name, default=config.size(f"_{name}", default=6)) != 0


def has_rope(config: ConfigFields, index: int) -> bool:
    """Hold for layers that `no_rope_layers` marks with 1, else for all but every n-th."""
    listed = config.counts("no_rope_layers")
    if not listed:
        return (index + 1) % config.size("no_rope_layer_interval") != 0
    if index >= len(listed):
        raise config.damaged(f"no_rope_layers has {len(listed)} entries, fewer than layers")
    return bool(listed[index])


def sparse_step(config: ConfigFields, index: int) -> bool:
    """Hold for the last of every `decoder_sparse_step` layers but `mlp_only_layers`."""
    if index in config.counts("mlp_only_layers"):
        return False
    return (index + 1) % config.size("decoder_sparse_step", default=1) == 0


def in_moe_layers(config: ConfigFields, index: int) -> bool:
    """Hold for `moe_layers`, else for the last of every `interleave_moe_layer_step` layers."""
    if config.values.get("moe_layers") is not None:
        return index in config.counts("moe_layers")
    return (index + 1) % config.size("interleave_moe_layer_step", default=1) == 0


def has_no_rope(config: ConfigFields, index: int) -> bool:
    """Hold for the layers that `has_rope` leaves out."""
    return not has_rope(config, index)
