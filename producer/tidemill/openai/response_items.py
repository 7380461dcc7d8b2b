"""Items of OpenAI's Responses API as the messages and tools of a chat; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.protocol.errors import InvalidRequest
from tidemill.service.prompt import check_num_messages

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def input_items(given: object) -> list[dict[str, Any]]:
    """Return an input as items: a text is one of the user's.

    Raises ``InvalidRequest`` naming the item and field that is wrong or not supported.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": _string(given, "input")}]
    if not isinstance(given, Sequence) or not given:
        raise _wrong("input", "it is neither text nor a list of items")
    check_num_messages("input", len(given))
    return [_item(item, f"input.{index}") for index, item in enumerate(given)]


def chat_messages(
    instructions: str | None, items: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages of a chat; reasoning, text and calls in a row are one message."""
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    for item in items:
        if item["type"] == "message" and item["role"] != "assistant":
            chat.append({"role": item["role"], "content": text_of(item["content"])})
        elif item["type"] == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else text_of(output)
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        else:
            _extend(chat, item)
    return chat


def without_oldest(items: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return items without the first ``count``, and without those up to the next of the user.

    What systems and developers say stays; outputs of calls go with their calls.
    """
    users = (place for place in range(count, len(items)) if items[place].get("role") == "user")
    start = next(users, count)
    kept = [item for item in items[:start] if item.get("role") in ("system", "developer")]
    kept += items[start:]
    calls = {item["call_id"] for item in kept if item["type"] == "function_call"}
    return [
        item for item in kept if item["type"] != "function_call_output" or item["call_id"] in calls
    ]


def chat_tools(tools: Sequence[object] | None) -> list[dict[str, Any]] | None:
    """Return the tools of a chat; raises ``InvalidRequest`` for those that a server would run."""
    return [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools or ())] or None


def chat_tool_choice(choice: object) -> str | dict[str, Any] | None:
    """Return the tool choice of a chat; raises ``InvalidRequest``."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping) and kind == "allowed_tools":
        listed = choice.get("tools")
        tools = [chat_tool_choice(tool) for tool in listed] if isinstance(listed, list) else listed
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}
    raise _wrong("tool_choice", f"a choice of type {str(kind)[:40]!r} is not supported here")


def response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the response format of a chat, given the field ``text``."""
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise _wrong("text.format", "it is not an object")
    if form.get("type") != "json_schema":
        return dict(form)
    named = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": named}


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of an item's parts."""
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in parts)


def _extend(chat: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    if not chat or chat[-1]["role"] != "assistant" or _begins_anew(chat[-1], item):
        chat.append({"role": "assistant", "content": ""})
    message = chat[-1]
    match item["type"]:
        case "reasoning":
            message["reasoning_content"] = text_of(item.get("content") or item["summary"])
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        case _:
            message["content"] = text_of(item["content"])


def _begins_anew(message: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Whether an item comes before what its message would hold already."""
    if item["type"] == "function_call":
        return False
    if item["type"] == "reasoning":
        return True
    return bool(message["content"]) or "tool_calls" in message


def _item(item: object, field: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _wrong(field, "it is not an object")
    match item.get("type") or ("message" if "role" in item else None):
        case "message":
            return _message(item, field)
        case "function_call":
            names = ("call_id", "name", "arguments")
            return _taken(item, field, "function_call", names) | {"status": "completed"}
        case "function_call_output":
            return _call_output(item, field)
        case "reasoning":
            return _reasoning(item, field)
        case other:
            raise _wrong(field, f"items of type {str(other)[:40]!r} are not supported here")


def _message(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _wrong(f"{field}.role", f"it is none of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        **_id_of(item, field),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": _parts(content, f"{field}.content", kind),
    }


def _call_output(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, f"{field}.output", "input_text")
    taken = _taken(item, field, "function_call_output", ("call_id",))
    return taken | {"output": output, "status": "completed"}


def _reasoning(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    # Nobody but its maker can read what is encrypted.
    content, summary = item.get("content"), item.get("summary") or []
    return {
        **_id_of(item, field),
        "type": "reasoning",
        "summary": _parts(summary, f"{field}.summary", "summary_text"),
        "content": _parts(content or [], f"{field}.content", "reasoning_text"),
    }


def _parts(content: object, field: str, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(kind, _string(content, field))]
    if not isinstance(content, Sequence):
        raise _wrong(field, "it is neither text nor a list of parts")
    return [_part(part, f"{field}.{place}", kind) for place, part in enumerate(content)]


def _part(part: object, field: str, kind: str) -> dict[str, Any]:
    given = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or given not in _TEXTS:
        raise _wrong(field, f"parts of type {str(given)[:40]!r} are not supported, only text is")
    if given == "refusal":
        return {"type": "refusal", "refusal": _string(part.get("refusal"), f"{field}.refusal")}
    return _text_part(kind, _string(part.get("text"), f"{field}.text"))


def _text_part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _taken(item: Mapping[str, Any], field: str, kind: str, names: Sequence[str]) -> dict[str, Any]:
    texts = {name: _string(item.get(name), f"{field}.{name}") for name in names}
    return {**_id_of(item, field), "type": kind, **texts}


def _id_of(item: Mapping[str, Any], field: str) -> dict[str, str]:
    return {"id": _string(item["id"], f"{field}.id")} if item.get("id") is not None else {}


def _tool(tool: object, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(field, "it is not an object")
    kind = tool.get("type")
    if kind != "function":
        raise _wrong(f"{field}.type", f"tools of type {str(kind)[:40]!r} are not run here")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, "it is not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(field, "it has half of a surrogate pair") from error
    return value


def _wrong(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field=field)
