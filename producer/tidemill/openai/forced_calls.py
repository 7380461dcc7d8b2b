"""Calls that the model must make: a constraint under which every output that ends is calls.

The output is a JSON list of ``{"name": ..., "arguments": {...}}`` and nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.openai.closed_schemas import closed
from tidemill.openai.deltas import Delta
from tidemill.openai.json_values import read_json
from tidemill.openai.readings import make_call
from tidemill.openai.tools import Tool
from tidemill.protocol.structured import StructuredOutput

MAX_FORCED_CALLS = 16


def forced_calls(tools: Sequence[Tool], *, is_parallel: bool) -> StructuredOutput:
    """Return the constraint to call one or, if it ``is_parallel``, several of ``tools``.

    It is strict if all tools are, and arguments are ``closed``.  Raises ``ValueError`` of pydantic
    if schemas are too large.
    """
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_FORCED_CALLS if is_parallel else 1,
        "items": {"anyOf": [_call_schema(tool) for tool in tools]},
        "$defs": {tool.name: _rebased(closed(tool.parameters), tool.name) for tool in tools},
    }
    return StructuredOutput.model_validate(
        {"json_schema": schema, "strict": all(tool.strict for tool in tools)}
    )


class ForcedCallParser:
    """Tells each call of such an output when it is whole; never raises."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> Delta:
        """Take the next piece; returns the calls that it completed."""
        self._pending += text
        calls = []
        while True:
            rest = self._pending.lstrip(" \t\r\n[,")
            found = read_json(rest)
            if found.end < 0:
                break
            value = found.value if isinstance(found.value, dict) else {}
            call = make_call(value.get("name"), value.get("arguments"))
            if call is None:
                break
            calls.append(call)
            self._pending = rest[found.end :]
        return Delta(tool_calls=tuple(calls))

    def finish(self) -> Delta:
        """End the output; a call that was cut off is dropped."""
        return Delta()


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "arguments": {"$ref": f"#/$defs/{_escaped(tool.name)}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _rebased(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a tool's schema for its new place: its references began at its own root."""
    moved = _move(schema, f"#/$defs/{_escaped(name)}")
    return {"type": "object", **moved} if isinstance(moved, dict) else {"type": "object"}


def _move(value: Any, base: str) -> Any:
    if isinstance(value, Mapping):
        return {
            key: base + item[1:] if _is_reference(key, item) else _move(item, base)
            for key, item in value.items()
        }
    return [_move(item, base) for item in value] if isinstance(value, list) else value


def _is_reference(key: str, item: object) -> bool:
    return key == "$ref" and isinstance(item, str) and (item == "#" or item.startswith("#/"))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
