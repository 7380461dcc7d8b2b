"""Flags of vLLM that a worker has under another name, need not have, or will not have.

Names and meanings are those of vLLM 0.8 to 0.33, where several of them come and go.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.options.vllm_other_flags import (
    OTHER_FLAGS,
    WITH_SEVERAL_VALUES,
    Noted,
    Refused,
    Renamed,
)


class Translation(NamedTuple):
    """A command line in our own flags, and what is to be told of those that were not."""

    arguments: list[str]
    notes: list[str]


_SWITCH = None

FLAGS: dict[str, Renamed | Noted | Refused] = OTHER_FLAGS | {
    "--kv-offloading-size": Renamed("--swap-space"),
    "--shutdown-timeout": Renamed("--drain-seconds"),
    "--seed": Noted("every job has a seed of its own"),
    "--load-format": Noted("weights are read from safetensors or GGUF", ("auto", "safetensors")),
    "--tokenizer-mode": Noted("tokenizer.json is what is read", ("auto", "fast")),
    "--prefix-caching-hash-algo": Noted("blocks are always named by sha256_cbor"),
    "--scheduling-policy": Noted("jobs always run by class, then priority, then age"),
    "--stream-interval": Noted("it is a flag of the gateway"),
    "--structured-outputs-config": Noted("llguidance compiles all grammars"),
    "--guided-decoding-backend": Noted("llguidance compiles all grammars"),
    "--kv-offloading-backend": Noted("swapped blocks lie in host memory", ("native",)),
    "--distributed-executor-backend": Noted("ranks are processes of this machine", ("mp",)),
    "--max-num-partial-prefills": Noted("prefills share a step as its budget allows"),
    "--max-long-partial-prefills": Noted("prefills share a step as its budget allows"),
    "--max-seq-len-to-capture": Noted("no CUDA graphs are captured"),
    "--data-parallel-size": Noted("one worker is one replica", ("1",)),
    "--use-v2-block-manager": Noted("there is one block manager", _SWITCH),
    "--async-scheduling": Noted("steps are planned one at a time", _SWITCH),
    "--no-async-scheduling": Noted("steps are planned one at a time", _SWITCH),
    "--disable-custom-all-reduce": Noted("there is none", _SWITCH),
    "--disable-log-stats": Noted("statistics are metrics, see --metrics-port", _SWITCH),
    "--disable-log-requests": Noted("prompts are never logged", _SWITCH),
    "--enable-prompt-tokens-details": Noted("cached tokens are always told", _SWITCH),
    "--enable-auto-tool-choice": Noted("calls are read by whoever renders tools", _SWITCH),
    "--enable-log-requests": Refused(
        "would write prompts to the log", "Leave it out; `tidemill status` shows what runs."
    ),
    "--trust-remote-code": Refused(
        "would run code that a model brings along", "Choose a model whose code is in transformers."
    ),
    "--revision": Refused("is part of the name", "Write --model NAME@REVISION."),
    "--download-dir": Refused("is a matter of the hub's cache", "Set HF_HOME."),
    "--tokenizer": Refused("is part of the model's directory", "Put tokenizer.json into it."),
    "--chat-template": Refused(
        "is part of the model's directory", "Put it there as chat_template.jinja."
    ),
}


#: Values of our flags that vLLM has other names for; "" leaves the flag out.
VALUES = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--quantization": {"gptq_marlin": "gptq", "awq_marlin": "awq", "None": ""},
    "--max-model-len": {"auto": "", "-1": ""},
}
#: Our switches that may have "=true" or "=false" behind them.
_SWITCHES = ("--enable-prefix-caching", "--enable-chunked-prefill")


def translate(arguments: Sequence[str]) -> Translation:
    """Put flags of vLLM into ours; raises ``ConfigError`` for those that are refused.

    Names may have underscores in place of dashes, and a dot behind the name of an object for one of
    its fields.
    """
    rest = list(arguments)
    result = Translation([], [])
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if equals:
            rest.insert(0, value)
        _translate_one(name, bool(equals), rest, result)
    return result


def _translate_one(name: str, has_value: bool, rest: list[str], result: Translation) -> None:
    """Put the flag ``name`` into ours, taking its value from ``rest``; ``has_value``: by a "="."""
    flag = FLAGS.get(name) or FLAGS.get(_object(name))
    if isinstance(flag, Refused):
        raise ConfigError(f"{name} {flag.reason}", fix=flag.fix)
    if isinstance(flag, Noted):
        _take_along(name, flag, has_value, rest)
        result.notes.append(f"{name} changes nothing: {flag.note}")
        return
    if flag is not None:
        result.notes.append(f"{name} is {flag.ours} here")
        name = flag.ours
    result.arguments.extend(_ours(name, has_value, rest))


def _object(name: str) -> str:
    """Return the flag whose value is an object, of one that sets a field of it; ``-O3`` is -O."""
    return "-O" if name.startswith("-O") else name.partition(".")[0]


def _ours(name: str, has_value: bool, rest: list[str]) -> list[str]:
    if has_value and name in _SWITCHES:
        return [_switched(name, rest.pop(0))]
    if name in VALUES and rest and (has_value or not rest[0].startswith("--")):
        given = rest.pop(0)
        value = VALUES[name].get(given, given)
        return [f"{name}={value}"] if value else []
    return [f"{name}={rest.pop(0)}"] if has_value else [name]


def _switched(name: str, value: str) -> str:
    off = f"--no-{name.removeprefix('--')}"
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{name} {value!r} is neither", fix=f"Write {name} or {off}.")
    return name if value.lower() == "true" else off


def _take_along(name: str, flag: Noted, has_value: bool, rest: list[str]) -> None:
    if flag.values is None or (name.startswith("-O") and name != "-O"):
        return
    _check(name, flag.values, _take(name, rest))
    while name in WITH_SEVERAL_VALUES and not has_value and rest and rest[0][0] != "-":
        rest.pop(0)


def _take(name: str, rest: list[str]) -> str:
    if not rest:
        raise ConfigError(f"{name} lacks its value", fix="Give one, or leave the flag out.")
    return rest.pop(0)


def _check(name: str, values: Iterable[str], value: str) -> None:
    known = tuple(values)
    if not known or value in known:
        return
    if name == "--data-parallel-size":
        fix = f"Start {value} workers: they share the queue, also over machines."
    else:
        fix = f"Choose {' or '.join(known)}."
    raise ConfigError(f"{name} {value} cannot be had", fix=fix)
