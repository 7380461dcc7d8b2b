"""Flags of vLLM that a worker has under another name, need not have, or will not have.

Names and meanings are those of vLLM 0.8 to 0.33, where several of them come and go.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.protocol.errors import ConfigError


class Translation(NamedTuple):
    """A command line in our own flags, and what is to be told of those that were not."""

    arguments: list[str]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A flag with a value, which another of ours takes."""

    ours: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A flag without effect: ``values`` are those it may have, none for any; None: it has none."""

    note: str
    values: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag whose meaning cannot be had here; ``fix`` tells what to do in its place."""

    reason: str
    fix: str


_SWITCH = None
_GATEWAY = Refused("is a matter of HTTP, which workers do not speak", "Leave it out.")

FLAGS: dict[str, Renamed | Noted | Refused] = {
    "--kv-offloading-size": Renamed("--swap-space"),
    "--shutdown-timeout": Renamed("--drain-seconds"),
    "--seed": Noted("every job has a seed of its own"),
    "--load-format": Noted("weights are read from safetensors or GGUF", ("auto", "safetensors")),
    "--tokenizer-mode": Noted("tokenizer.json is what is read", ("auto", "fast")),
    "--generation-config": Noted("end tokens come from the model, sampling from the job"),
    "--prefix-caching-hash-algo": Noted("blocks are always named by sha256_cbor"),
    "--scheduling-policy": Noted("jobs always run by class, then priority, then age"),
    "--stream-interval": Noted("tokens are published at once, and together while one is written"),
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
    "--host": _GATEWAY,
    "--port": _GATEWAY,
    "--api-key": _GATEWAY,
    "--chat-template": Refused(
        "is part of the model's directory", "Put it there as chat_template.jinja."
    ),
    "--tool-call-parser": _GATEWAY,
    "--reasoning-parser": _GATEWAY,
}


def translate(arguments: Sequence[str]) -> Translation:
    """Put flags of vLLM into ours; raises ``ConfigError`` for those that are refused."""
    rest = list(arguments)
    result = Translation([], [])
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        flag = FLAGS.get(name)
        if flag is None:
            result.arguments.append(name + equals + value)
        elif isinstance(flag, Refused):
            raise ConfigError(f"{name} {flag.reason}", fix=flag.fix)
        elif isinstance(flag, Renamed):
            result.arguments.append(flag.ours + equals + value)
            result.notes.append(f"{name} is {flag.ours} here")
        else:
            if flag.values is not None:
                _check(name, flag.values, value if equals else _take(name, rest))
            result.notes.append(f"{name} changes nothing: {flag.note}")
    return result


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
