"""Reads ``quantization_config`` of a config.json."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.loading.config_fields import ConfigFields
from tidemill_gpuworker.quantization.compressed_tensors import read_compressed_tensors
from tidemill_gpuworker.quantization.formats.awq import AwqFormat
from tidemill_gpuworker.quantization.formats.float4 import BitsAndBytes4Format
from tidemill_gpuworker.quantization.formats.fp8 import Fp8Format
from tidemill_gpuworker.quantization.formats.gptq import GptqFormat
from tidemill_gpuworker.quantization.formats.int8 import Int8Format
from tidemill_gpuworker.quantization.formats.squeezellm import SqueezeLlmFormat
from tidemill_gpuworker.quantization.scheme import Matcher, QuantScheme, any_layer, part_of_name
from tidemill_gpuworker.quantization.stored_layer import Format

_WHOLE_INPUT = -1
_SCB_CODE = 127.0


def read_scheme(values: Mapping[str, Any], path: Path) -> QuantScheme | None:
    """Return how the model with these fields of config.json is quantised, None if it is not.

    Raises:
        DamagedModel: a field has a value of the wrong kind.
        UnsupportedModel: a method, format or option that is not read.
    """
    section = ConfigFields(values, path).section("quantization_config")
    if not section:
        return None
    fields = ConfigFields(section, path)
    method = str(section.get("quant_method", "unknown"))
    if method not in _READERS:
        raise fields_unsupported(fields, f"{method} quantisation is not supported")
    return _READERS[method](fields)


def fields_unsupported(fields: ConfigFields, reason: str) -> UnsupportedModel:
    """Return the error for something that is not read."""
    return UnsupportedModel(
        f"{fields.path}: {reason}",
        fix=f"Use the unquantised model, or one quantised by {', '.join(_READERS)}.",
    )


def choice(fields: ConfigFields, name: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    """Return a field that must be one of ``allowed``; raises UnsupportedModel naming it."""
    value = fields.values.get(name)
    value = default if value is None else value
    if value not in allowed or isinstance(value, bool) != isinstance(default, bool):
        known = ", ".join(map(str, allowed))
        raise fields_unsupported(fields, f"{name} {value!r} is not supported, only {known}")
    return value


def _group_size(fields: ConfigFields) -> int:
    """Return the inputs of a group, 0 for all of them."""
    value = fields.values.get("group_size", _WHOLE_INPUT)
    return 0 if value == _WHOLE_INPUT else fields.size("group_size")


def _gptq(fields: ConfigFields) -> QuantScheme:
    bits = choice(fields, "bits", None, (2, 4, 8))
    layout = choice(fields, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    choice(fields, "lm_head", False, (False,))
    choice(fields, "is_marlin_format", False, (False,))
    found = GptqFormat(bits, _group_size(fields), zeros_less_one=layout == "gptq")
    return QuantScheme("gptq", ((any_layer, found),), _gptq_ignored(fields))


def _gptq_ignored(fields: ConfigFields) -> tuple[Matcher, ...]:
    rules = fields.section("dynamic")
    changed = [rule for rule in rules if not rule.startswith("-:")]
    if changed:
        raise fields_unsupported(
            fields, f"dynamic {changed[0]!r}, another format for some layers, is not supported"
        )
    return tuple(_starts_with(fields, rule.removeprefix("-:")) for rule in rules)


def _starts_with(fields: ConfigFields, text: str) -> Matcher:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise fields.damaged(f"dynamic {text!r} is no pattern: {error}") from error
    return lambda name: pattern.match(name) is not None


def _awq(fields: ConfigFields) -> QuantScheme:
    # Two names for each field: the configs of AutoAWQ's own files have short ones.
    name = "w_bit" if "w_bit" in fields.values else "bits"
    choice(fields, name, None, (4,))
    choice(fields, "version", "gemm", ("gemm", "GEMM"))
    choice(fields, "zero_point", True, (True,))
    size = _group_size(fields) if "group_size" in fields.values else fields.size("q_group_size")
    return _scheme("awq", AwqFormat(size), fields, "modules_to_not_convert")


def _fp8(fields: ConfigFields) -> QuantScheme:
    choice(fields, "fmt", "e4m3", ("e4m3",))
    choice(fields, "activation_scheme", "dynamic", ("dynamic", "static"))
    block = fields.counts("weight_block_size")
    if block and (len(block) != 2 or 0 in block):
        raise fields.damaged(f"weight_block_size must be rows and columns, not {block}")
    found = Fp8Format((block[0], block[1]) if block else None)
    return _scheme("fp8", found, fields, "modules_to_not_convert", "ignored_layers")


def _fbgemm_fp8(fields: ConfigFields) -> QuantScheme:
    return _scheme("fbgemm_fp8", Fp8Format(), fields, "modules_to_not_convert")


def _squeezellm(fields: ConfigFields) -> QuantScheme:
    choice(fields, "wbits", None, (4,))
    return _scheme("squeezellm", SqueezeLlmFormat(), fields)


def _bitsandbytes(fields: ConfigFields) -> QuantScheme:
    found: Format
    if fields.flag("load_in_8bit"):
        found = Int8Format("SCB", _SCB_CODE)
    else:
        kind = choice(fields, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
        choice(fields, "bnb_4bit_quant_storage", "uint8", ("uint8",))
        found = BitsAndBytes4Format(kind)
    return _scheme("bitsandbytes", found, fields, "llm_int8_skip_modules")


def _scheme(method: str, found: Format, fields: ConfigFields, *ignore: str) -> QuantScheme:
    ignored = (part_of_name(part) for name in ignore for part in fields.names(name))
    return QuantScheme(method, ((any_layer, found),), tuple(ignored))


_READERS: dict[str, Callable[[ConfigFields], QuantScheme]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "squeezellm": _squeezellm,
}

#: The names of ``quant_method`` that are read.
METHODS = tuple(_READERS)
