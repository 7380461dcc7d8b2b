"""JSON schemas that allow no properties but those they name.

Most clients make a tool's schema from the signature of a function and say nothing of further
properties, which JSON Schema then allows. A model would make some up, and the function would
refuse the call. Whatever a closed schema allows, the one that was sent allows too.
"""

from collections.abc import Mapping
from typing import Any

#: What an object may have is not told in one place where one of these is ...
_COMBINING = frozenset(("allOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"))
#: ... or two of these.
_ALTERNATIVES = frozenset(("properties", "anyOf", "oneOf", "$ref"))
_BRANCHES = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")
#: An object that says one of these has said what else it may have, or needs more than it names.
_SAYS_MORE = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "minProperties",
)


def closed(schema: Any) -> Any:
    """Return ``schema`` with all objects closed that name their properties and say no more.

    A schema that combines others by ``allOf`` and the like is returned as it is.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(value: Any) -> bool:
    if isinstance(value, Mapping):
        is_told_twice = len(_ALTERNATIVES.intersection(value)) > 1
        parts = value.values()
        return is_told_twice or not _COMBINING.isdisjoint(value) or any(map(_combines, parts))
    return isinstance(value, list) and any(map(_combines, value))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = {key: _closed_below(key, value) for key, value in schema.items()}
    return {**result, "additionalProperties": False} if _can_close(schema) else result


def _closed_below(key: str, value: Any) -> Any:
    if key == "items":
        return _closed(value)
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _closed(each) for name, each in value.items()}
    if key in _BRANCHES and isinstance(value, list):
        return [_closed(each) for each in value]
    return value


def _can_close(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and bool(properties)
        and isinstance(required, list)
        and all(name in properties for name in required)
        and not any(key in schema for key in _SAYS_MORE)
    )
