"""Requests of Anthropic's Messages API as chats of OpenAI's; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.protocol.errors import InvalidRequest
from tidemill.service.prompt import check_num_messages

#: What ``tool_choice`` is called there and here.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_messages(system: object, messages: object) -> list[dict[str, Any]]:
    """Return the messages of a chat: the system's, then each one's parts in their order.

    Results of tools become messages of their own.  Raises ``InvalidRequest`` naming the message
    and block that is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _wrong("messages", "it is not a list of messages")
    check_num_messages("messages", len(messages))
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(messages):
        chat += _message(message, f"messages.{index}")
    return chat


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message of a chat is the beginning of the answer."""
    last = messages[-1]
    has_text = bool(str(last.get("content") or "").strip())
    return last["role"] == "assistant" and has_text and "tool_calls" not in last


def chat_tools(tools: Sequence[object] | None) -> list[dict[str, Any]] | None:
    """Return the tools of a chat; raises ``InvalidRequest`` for those that a server would run."""
    return [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools or ())] or None


def chat_tool_choice(choice: object) -> tuple[str | dict[str, Any] | None, bool]:
    """Return the tool choice of a chat, and whether calls may be parallel."""
    if choice is None:
        return None, True
    if not isinstance(choice, Mapping):
        raise _wrong("tool_choice", "it is not an object")
    is_parallel = not choice.get("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind == "tool":
        name = _string(choice.get("name"), "tool_choice.name")
        return {"type": "function", "function": {"name": name}}, is_parallel
    if kind not in _CHOICES:
        raise _wrong("tool_choice.type", "it is none of auto, any, tool and none")
    return _CHOICES[kind], is_parallel


def _message(message: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise _wrong(field, "it is not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise _wrong(f"{field}.role", "it is neither user nor assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, Sequence):
        raise _wrong(f"{field}.content", "it is neither text nor a list of blocks")
    blocks = [_block(block, f"{field}.content.{place}") for place, block in enumerate(content)]
    return _user(blocks, field) if role == "user" else _assistant(blocks, field)


def _user(blocks: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        where = f"{field}.content.{place}"
        if block["type"] == "tool_result":
            told.append(_tool_result(block, where))
        elif block["type"] != "text":
            raise _unsupported(where, block["type"])
        elif told and told[-1]["role"] == "user":
            told[-1]["content"] += f"\n{_string(block.get('text'), f'{where}.text')}"
        else:
            told.append({"role": "user", "content": _string(block.get("text"), f"{where}.text")})
    return told or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        where = f"{field}.content.{place}"
        match block["type"]:
            case "text":
                texts.append(_string(block.get("text"), f"{where}.text"))
            case "thinking":
                thoughts.append(_string(block.get("thinking"), f"{where}.thinking"))
            case "tool_use":
                calls.append(_tool_use(block, where))
            case "redacted_thinking":
                continue  # nobody but its maker can read it
            case other:
                raise _unsupported(where, other)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool_use(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{field}.input", "it is not an object")
    function = {"name": _string(block.get("name"), f"{field}.name"), "arguments": arguments}
    return {"id": _string(block.get("id"), f"{field}.id"), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _text(content, f"{field}.content")
    return {
        "role": "tool",
        "tool_call_id": _string(block.get("tool_use_id"), f"{field}.tool_use_id"),
        "content": text,
    }


def _text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(field, "it is neither text nor a list of blocks")
    texts = []
    for place, given in enumerate(content):
        where = f"{field}.{place}"
        block = _block(given, where)
        if block["type"] != "text":
            raise _unsupported(where, block["type"])
        texts.append(_string(block.get("text"), f"{where}.text"))
    return "\n".join(texts)


def _block(block: object, field: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise _wrong(field, "it is no block with a type")
    return block


def _tool(tool: object, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(field, "it is not an object")
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise _wrong(f"{field}.type", f"tools of type {str(kind)[:40]!r} are not run here")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise _wrong(f"{field}.input_schema", "it is not a schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, "it is not text")
    return value


def _unsupported(field: str, kind: str) -> InvalidRequest:
    return _wrong(field, f"blocks of type {kind[:40]!r} are not supported here")


def _wrong(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field=field)
