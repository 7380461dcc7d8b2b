"""Calls that are written as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, Kimi."""

import re
from typing import Any

from tidemill.openai.deltas import ToolCall
from tidemill.openai.json_values import read_json
from tidemill.openai.readings import UNFINISHED, Reading, Tools, done, make_call, malformed

Calls = tuple[ToolCall, ...] | None


def decode_object(text: str, tools: Tools) -> Calls:
    """One object ``{"name": ..., "arguments": {...}}``, as Hermes and Qwen write it."""
    found = read_json(text)
    if found.is_cut_off:
        return ()
    if found.is_malformed or text[found.end :].strip():
        return None
    return _calls_of([found.value])


def read_object(text: str, tools: Tools, is_all: bool) -> Reading:
    """One object after Llama 3's python tag."""
    found = read_json(text)
    if found.is_cut_off:
        return UNFINISHED
    calls = None if found.is_malformed else _calls_of([found.value])
    return malformed(0) if calls is None else done(calls, found.end)


def read_bare_object(text: str, tools: Tools, is_all: bool) -> Reading:
    """One object of an offered tool, as Llama 3 writes it, that nothing announces."""
    found = read_json(text)
    if found.is_cut_off:
        return UNFINISHED
    if found.is_malformed:
        return malformed(1)
    calls = _calls_of([found.value])
    if calls is None or (tools and calls[0].name not in tools):
        return malformed(found.end)
    return done(calls, found.end)


_NAMED = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*(?=\{)")


def read_mistral(text: str, tools: Tools, is_all: bool) -> Reading:
    """What follows ``[TOOL_CALLS]``: a list of objects, or a name and its arguments."""
    if text.lstrip().startswith("["):
        found = read_json(text)
        if found.is_cut_off:
            return UNFINISHED
        calls = None if found.is_malformed else _calls_of(found.value)
        return malformed(0) if calls is None else done(calls, found.end)
    named = _NAMED.match(text)
    if named is None:
        return malformed(0) if is_all and text.strip() else UNFINISHED
    found = read_json(text, named.end())
    if found.is_cut_off:
        return UNFINISHED
    call = None if found.is_malformed else make_call(named["name"], found.value)
    return malformed(0) if call is None else done((call,), found.end)


#: DeepSeek V3 writes "function<sep>NAME", a line break and fenced JSON, V3.1 "NAME<sep>JSON".
_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<v3>[^\n]*)\n```json\n"
    r"|(?P<v31>[^<\n]*)<｜tool▁sep｜>)"
)
_DEEPSEEK_END = re.compile(r"\s*(```)?\s*<｜tool▁call▁end｜>")


def decode_deepseek(text: str, tools: Tools) -> Calls:
    """The calls between DeepSeek's markers for begin and end of all calls."""
    return _decode_repeated(text, _DEEPSEEK, _DEEPSEEK_END)


_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>"
)
_KIMI_END = re.compile(r"\s*<\|tool_call_end\|>")


def decode_kimi(text: str, tools: Tools) -> Calls:
    """The calls of Kimi K2's section of tool calls."""
    return _decode_repeated(text, _KIMI, _KIMI_END)


def _decode_repeated(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> Calls:
    calls: list[ToolCall] = []
    position = 0
    while text[position:].strip():
        head = begin.search(text, position)
        if head is None:
            return tuple(calls) or None
        found = read_json(text, head.end())
        if found.is_cut_off:
            return tuple(calls)
        tail = None if found.is_malformed else end.match(text, found.end)
        name = next(name for name in head.groups() if name is not None)
        call = None if found.is_malformed else make_call(name.strip(), found.value)
        if call is None or (tail is None and text[found.end :].strip()):
            return None
        calls.append(call)
        position = len(text) if tail is None else tail.end()
    return tuple(calls)


def _calls_of(values: Any) -> Calls:
    if not isinstance(values, list) or not values:
        return None
    calls = [_call_of(value) for value in values]
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else None


def _call_of(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return make_call(value.get("name"), {} if arguments is None and _is_bare(value) else arguments)


def _is_bare(value: dict[str, Any]) -> bool:
    # A name alone calls a tool without parameters.
    return set(value) <= {"name", "type", "arguments", "parameters"}
