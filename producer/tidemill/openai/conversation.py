"""Chat messages of OpenAI's API as chat templates expect them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.protocol.errors import InvalidRequest
from tidemill.service.prompt import check_num_messages

#: Roles of OpenAI's API, and how templates call them.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}


def template_messages(messages: object, template: str = "") -> list[dict[str, Any]]:
    """Return messages with text content and tool calls whose arguments are objects.

    Roles are those of OpenAI's API and others that the source of the ``template`` names.

    ``content`` may be null or a list of text parts.  Fields that templates do not look at are
    left out.  Raises ``InvalidRequest`` naming the message and field that is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _wrong("messages", "it is not a list of messages")
    check_num_messages("messages", len(messages))
    return [
        _message(message, f"messages.{index}", template) for index, message in enumerate(messages)
    ]


def _message(message: object, field: str, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(field, "it is not an object")
    role = _role(message, field, template)
    plain: dict[str, Any] = {
        "role": role,
        "content": _text(message.get("content"), f"{field}.content"),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = _string(message[name], f"{field}.{name}")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        plain["reasoning_content"] = _string(reasoning, f"{field}.reasoning_content")
    if message.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{field}.tool_calls")
    return plain


def _role(message: Mapping[str, Any], field: str, template: str) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{field}.role", "it is missing")
    if role not in _ROLES and not any(f"{mark}{role}{mark}" in template for mark in "'\""):
        known = ", ".join(_ROLES)
        raise _wrong(f"{field}.role", f"{role[:40]!r} is none that the model knows: {known}")
    if role == "tool" and message.get("tool_call_id") is None:
        raise _wrong(f"{field}.tool_call_id", "it is missing")
    return _ROLES.get(role, role)


def _text(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(field, "it is neither text nor a list of parts")
    return "\n".join(_part(part, f"{field}.{index}") for index, part in enumerate(content))


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "input_text", "refusal"):
        raise _wrong(field, f"parts of type {str(kind)[:32]!r} are not supported, only text is")
    return _string(part.get("refusal" if kind == "refusal" else "text"), f"{field}.text")


def _tool_calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(field, "it is not a list of calls")
    return [_tool_call(call, f"{field}.{index}") for index, call in enumerate(calls)]


def _tool_call(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(f"{field}.function", "it is missing")
    plain: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _string(function.get("name"), f"{field}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{field}.function.arguments"),
        },
    }
    if call.get("id") is not None:
        plain["id"] = _string(call["id"], f"{field}.id")
    return plain


def _arguments(arguments: object, field: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _wrong(field, f"it is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise _wrong(field, "it is not an object")
    return dict(arguments)


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, "it is not text")
    return value


def _wrong(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field=field)
