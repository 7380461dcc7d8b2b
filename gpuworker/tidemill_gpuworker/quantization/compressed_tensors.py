"""Reads the ``quantization_config`` of compressed-tensors, which llm-compressor writes.

Its groups say which layers they are for, how weights are stored, and how activations were to be
quantised; the last is not done, since activations in the model's dtype lose less.
"""

import re
from typing import Any

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.loading.config_fields import ConfigFields
from tidemill_gpuworker.quantization.formats.float4 import Float4Format
from tidemill_gpuworker.quantization.formats.fp8 import Fp8Format
from tidemill_gpuworker.quantization.formats.int8 import Int8Format
from tidemill_gpuworker.quantization.formats.pack_quantized import PackQuantizedFormat
from tidemill_gpuworker.quantization.scheme import (
    Matcher,
    QuantScheme,
    any_layer,
    name_or_pattern,
)
from tidemill_gpuworker.quantization.stored_layer import Format

_MIXED = "mixed-precision"
_NVFP4_GROUP = 16
_MXFP4_GROUP = 32


def read_compressed_tensors(fields: ConfigFields) -> QuantScheme:
    """Return the scheme; raises DamagedModel or UnsupportedModel naming the field."""
    sparsity = fields.section("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(fields, f"sparsity {sparsity!r}")
    common = fields.values.get("format")
    groups = []
    for name, group in fields.section("config_groups").items():
        if not isinstance(group, dict):
            raise fields.damaged(f"config_groups {name} must be an object, not {group!r}")
        layout = str((group.get("format") or common) if common == _MIXED else common)
        found = _format(ConfigFields(group, fields.path), layout)
        groups += [(matches, found) for matches in _targets(ConfigFields(group, fields.path))]
    if not groups:
        raise fields.damaged("config_groups names no layers")
    # A name counts for more than the class of all layers.
    groups.sort(key=lambda group: group[0] is any_layer)
    ignored = tuple(_matcher(fields, text) for text in fields.names("ignore"))
    return QuantScheme("compressed-tensors", tuple(groups), ignored)


def _targets(group: ConfigFields) -> list[Matcher]:
    names = group.names("targets")
    return [any_layer if name == "Linear" else _matcher(group, name) for name in names]


def _matcher(fields: ConfigFields, text: str) -> Matcher:
    try:
        return name_or_pattern(text)
    except re.error as error:
        raise fields.damaged(f"{text!r} is no pattern: {error}") from error


def _format(group: ConfigFields, layout: str) -> Format:
    weights = ConfigFields(group.section("weights"), group.path)
    bits, kind = weights.size("num_bits"), str(weights.values.get("type", "int"))
    strategy = str(weights.values.get("strategy"))
    size = weights.size("group_size") if strategy in ("group", "tensor_group") else 0
    if layout in ("float-quantized", "naive-quantized") and (bits, kind) == (8, "float"):
        return Fp8Format(_block(weights, strategy))
    if layout in ("int-quantized", "naive-quantized") and (bits, kind) == (8, "int"):
        _check_strategy(weights, strategy, "tensor", "channel")
        return Int8Format()
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8):
        _check_strategy(weights, strategy, "channel", "group")
        return PackQuantizedFormat(bits, size, symmetric=weights.values.get("symmetric", True))
    return _float4(weights, layout, size)


def _float4(weights: ConfigFields, layout: str, size: int) -> Format:
    sizes = {"nvfp4-pack-quantized": _NVFP4_GROUP, "mxfp4-pack-quantized": _MXFP4_GROUP}
    if sizes.get(layout) != size:
        described: dict[str, Any] = {
            key: weights.values.get(key) for key in ("num_bits", "type", "strategy", "group_size")
        }
        raise _unsupported(weights, f"format {layout!r} with weights {described}")
    return Float4Format(size)


def _block(weights: ConfigFields, strategy: str) -> tuple[int, int] | None:
    _check_strategy(weights, strategy, "tensor", "channel", "block")
    if strategy != "block":
        return None
    block = weights.counts("block_structure")
    if len(block) != 2 or 0 in block:
        raise weights.damaged(f"block_structure must be rows and columns, not {block}")
    return block[0], block[1]


def _check_strategy(weights: ConfigFields, strategy: str, *allowed: str) -> None:
    if strategy not in allowed:
        raise _unsupported(
            weights, f"strategy {strategy!r} of {weights.values.get('type')} weights"
        )


def _unsupported(fields: ConfigFields, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{fields.path}: compressed-tensors {what} is not supported",
        fix="Use the unquantised model or another quantisation of it.",
    )
