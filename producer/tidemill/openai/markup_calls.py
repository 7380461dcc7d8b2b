"""Calls whose arguments are written as markup, one by one: Qwen3-Coder, GLM and DeepSeek's DSML.

Their values have no quotes, so the tool's schema tells what is a number and what a text.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.openai.deltas import ToolCall
from tidemill.openai.readings import UNFINISHED, Reading, Tools, done, make_call, malformed

Calls = tuple[ToolCall, ...] | None

_FUNCTION_NAME = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
#: A marker within a value is followed by neither another parameter nor the end.  Some models forget
#: to close a parameter.
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)"
    r"(?:\n?</parameter>(?=\s*(?:<parameter=|</function>))"
    r"|\n(?=<parameter=)|\n?(?=</function>\s*(?:<function=|\Z)))",
    re.DOTALL,
)
_INVOKE = re.compile(
    r"\s*<｜DSML｜ ?invoke name=\"(?P<name>[^\"]+)\"(?:/>|>(?P<body>.*?)</｜DSML｜ ?invoke>)\s*",
    re.DOTALL,
)
_DSML_PARAMETER = re.compile(
    r"\s*<｜DSML｜ ?parameter name=\"(?P<name>[^\"]+)\"(?: string=\"(?P<text>true|false)\")?>"
    r"(?P<value>.*?)</｜DSML｜ ?parameter>\s*",
    re.DOTALL,
)
_GLM = re.compile(r"\s*(?P<name>[^\s<]+)\s*(?P<body>.*)", re.DOTALL)
_GLM_PARAMETER = re.compile(
    r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL
)


def decode_qwen_xml(text: str, tools: Tools) -> Calls:
    """``<function=NAME><parameter=KEY>value</parameter></function>``, once or several times."""
    calls: tuple[ToolCall, ...] = ()
    position = 0
    while text[position:].strip():
        head = _FUNCTION_NAME.match(text, position)
        if head is None:
            return calls if "<function=".startswith(text[position:].strip()) else None
        parameters, position = _parameters_at(text, head.end())
        end = _FUNCTION_END.match(text, position)
        if end is None:
            return calls
        calls += _call(head["name"], parameters, tools)
        position = end.end()
    return calls


def read_function(text: str, tools: Tools, is_all: bool) -> Reading:
    """What follows a ``<function=`` that no ``<tool_call>`` came before."""
    end = text.find("</function>")
    while end >= 0:
        end += len("</function>")
        calls = decode_qwen_xml("<function=" + text[:end], tools)
        if calls:
            rest = text[end:].lstrip()
            if not is_all and _TOOL_CALL_END.startswith(rest):
                return UNFINISHED
            if rest.startswith(_TOOL_CALL_END):
                end = len(text) - len(rest) + len(_TOOL_CALL_END)
            return done(calls, end)
        end = text.find("</function>", end)
    return malformed(0) if is_all and "</function>" in text else UNFINISHED


_TOOL_CALL_END = "</tool_call>"


def _parameters_at(text: str, position: int) -> tuple[list[re.Match[str]], int]:
    found = []
    while parameter := _PARAMETER.match(text, position):
        found.append(parameter)
        position = parameter.end()
    return found, position


def decode_dsml(text: str, tools: Tools) -> Calls:
    """DeepSeek V3.2's and V4's ``invoke`` elements."""
    return _decode(text, tools, _INVOKE, _DSML_PARAMETER, "<｜DSML｜")


def decode_glm(text: str, tools: Tools) -> Calls:
    """A name, then pairs of ``arg_key`` and ``arg_value``."""
    found = _GLM.fullmatch(text)
    if found is None:
        return () if not text.strip() else None
    if found["body"].count("<arg_value>") > found["body"].count("</arg_value>"):
        return ()
    call = _call(found["name"], _GLM_PARAMETER.finditer(found["body"]), tools)
    return None if _GLM_PARAMETER.sub("", found["body"]).strip() else call


def _decode(
    text: str,
    tools: Tools,
    function: re.Pattern[str],
    parameter: re.Pattern[str],
    begin: str,
) -> Calls:
    calls: tuple[ToolCall, ...] = ()
    rest = text.strip()
    while rest:
        found = function.match(rest)
        if found is None:
            is_cut_off = rest.startswith(begin) or begin.startswith(rest)
            return calls if is_cut_off else calls or None
        body = found["body"] or ""
        call = _call(found["name"], parameter.finditer(body), tools)
        if parameter.sub("", body).strip():
            return None
        calls += call
        rest = rest[found.end() :]
    return calls


def _call(name: str, parameters: Iterable[re.Match[str]], tools: Tools) -> tuple[ToolCall, ...]:
    name = name.strip()
    schemas = tools.get(name, {}).get("properties", {})
    arguments = {
        each["name"].strip(): _value(each, schemas.get(each["name"].strip(), {}))
        for each in parameters
    }
    call = make_call(name, arguments)
    return () if call is None else (call,)


def _value(parameter: re.Match[str], schema: Any) -> Any:
    text = parameter["value"]
    is_text = parameter.groupdict().get("text")
    if is_text == "true":
        return text
    types = ["any"] if is_text == "false" else types_of(schema)
    return coerce(text, types)


def types_of(schema: Any) -> list[str]:
    """Return the names of the types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared or ())
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types += types_of(choice)
    return types


def coerce(text: str, types: list[str]) -> Any:
    """Return the value that ``text`` stands for, given the types its schema allows.

    A schema that allows a text and something else gets the something else where it parses.
    """
    if types and set(types) == {"string"}:
        return text
    stripped = text.strip()
    if stripped in ("None", "True", "False") and set(types) & {"null", "boolean"}:
        stripped = {"None": "null"}.get(stripped, stripped.lower())
    try:
        value = json.loads(stripped, strict=False)
    except (ValueError, RecursionError):
        return text
    return value if _is_of(value, types) else text


_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def _is_of(value: object, types: list[str]) -> bool:
    if not types or "any" in types:
        return not isinstance(value, str) or "any" in types
    kinds = {kind for name in types for kind in _TYPES.get(name, ())}
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return True
    return type(value) in kinds
