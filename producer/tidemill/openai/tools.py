"""The tools that a request offers, and which of them the model must call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import MAX_SCHEMA_NESTING, nesting

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function; ``parameters`` is the JSON schema of its arguments, an object's."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def as_function(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class CallMode(StrEnum):
    """Whether the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    FORCED = "forced"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The mode, and the tools that may be called in it; ``is_named``: it is one call of this."""

    mode: CallMode
    tools: tuple[Tool, ...] = ()
    is_named: bool = False


def parse_tools(tools: object) -> tuple[Tool, ...]:
    """Return the tools of a request; raises ``InvalidRequest`` naming the one that is wrong."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidRequest(
            "tools: it is not a list of tools", field="tools", fix="Leave it out for no tools."
        )
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools: there are {len(tools)}, the limit is {MAX_TOOLS}", field="tools"
        )
    parsed = tuple(_parse_tool(tool, f"tools.{index}") for index, tool in enumerate(tools))
    names = [tool.name for tool in parsed]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: {twice!r} occurs twice", field="tools")
    return parsed


def parse_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Return what ``tool_choice`` asks for; None is auto if there are tools.

    Raises ``InvalidRequest`` if it is not known, or names a tool that is not offered.
    """
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolChoice(CallMode.NONE)
    if not tools:
        raise _bad_choice("there are no tools to choose from")
    if choice == "auto":
        return ToolChoice(CallMode.AUTO, tuple(tools))
    if choice == "required":
        return ToolChoice(CallMode.FORCED, tuple(tools))
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), tools)
    name = _chosen_name(choice)
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        raise _bad_choice(f"{name[:64]!r} is none of the tools")
    return ToolChoice(CallMode.FORCED, chosen, is_named=True)


def _allowed(allowed: object, tools: Sequence[Tool]) -> ToolChoice:
    """Those tools that may be called."""
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise _bad_choice("the mode of allowed tools is neither auto nor required")
    listed = allowed.get("tools")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise _bad_choice("there are no allowed tools")
    names = [_chosen_name(tool) for tool in listed]
    unknown = set(names) - {tool.name for tool in tools}
    if unknown:
        raise _bad_choice(f"{min(unknown)[:64]!r} is none of the tools")
    return parse_tool_choice(allowed["mode"], [tool for tool in tools if tool.name in names])


def _parse_tool(tool: object, field: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise InvalidRequest(f"{field}: it is not a function tool", field=field)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{field}.function: it is missing", field=f"{field}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{field}.function.name: it is not a name",
            field=f"{field}.function.name",
            fix="Use 1 to 64 letters, digits, dots, dashes and underscores.",
        )
    if not isinstance(parameters, Mapping | None):
        raise InvalidRequest(
            f"{field}.function.parameters: a schema is an object",
            field=f"{field}.function.parameters",
        )
    if nesting(parameters) > MAX_SCHEMA_NESTING:
        raise InvalidRequest(
            f"{field}.function.parameters: it nests deeper than {MAX_SCHEMA_NESTING} levels",
            field=f"{field}.function.parameters",
        )
    return Tool(
        name, str(function.get("description") or ""), parameters or {}, bool(function.get("strict"))
    )


def _chosen_name(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _bad_choice("it is none of auto, none, required, a function and allowed tools")
    return name


def _bad_choice(reason: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {reason}", field="tool_choice")
