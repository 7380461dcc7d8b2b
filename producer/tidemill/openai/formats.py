"""How model families write reasoning and tool calls, by the names vLLM's parsers have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tidemill.openai.json_calls import (
    decode_deepseek,
    decode_kimi,
    decode_object,
    read_bare_object,
    read_mistral,
    read_object,
)
from tidemill.openai.markup_calls import decode_dsml, decode_glm, decode_qwen_xml, read_function
from tidemill.openai.pythonic_calls import decode_pythonic, read_pythonic
from tidemill.openai.readings import Reader, enclosed
from tidemill.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``readers``: opening marker -> reader of what follows it.

    ``bare`` reads calls that nothing announces: an output, or what follows a call, that begins
    with ``bare_start``.
    """

    readers: Mapping[str, Reader] = field(default_factory=dict)
    bare: Reader | None = None
    bare_start: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around reasoning; ``is_implied``: an output begins within it, marker or not."""

    open: str
    close: str
    is_implied: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Whether an output that follows ``prompt`` begins within the reasoning."""
        return self.is_implied or prompt.rstrip().endswith(self.open)


_HERMES = ToolFormat({"<tool_call>": enclosed("</tool_call>", decode_object)})
_LLAMA3 = ToolFormat({"<|python_tag|>": read_object}, bare=read_bare_object, bare_start="{")
_MISTRAL = ToolFormat({"[TOOL_CALLS]": read_mistral})
_PYTHONIC = ToolFormat(
    {"<|python_start|>": enclosed("<|python_end|>", decode_pythonic)},
    bare=read_pythonic,
    bare_start="[",
)
_QWEN_XML = ToolFormat(
    {"<tool_call>": enclosed("</tool_call>", decode_qwen_xml), "<function=": read_function}
)
_GLM = ToolFormat({"<tool_call>": enclosed("</tool_call>", decode_glm, needs_close=True)})
_KIMI = ToolFormat(
    {"<|tool_calls_section_begin|>": enclosed("<|tool_calls_section_end|>", decode_kimi)}
)
_DEEPSEEK = ToolFormat(
    {"<｜tool▁calls▁begin｜>": enclosed("<｜tool▁calls▁end｜>", decode_deepseek)}
)
_DSML = ToolFormat(
    {
        f"<｜DSML｜{name}>": enclosed(f"</｜DSML｜{name}>", decode_dsml)
        for name in ("function_calls", "tool_calls", " calls")
    }
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen2_5": _HERMES,
    "qwen3": _HERMES,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _DSML,
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": _KIMI,
}

Format = TypeVar("Format")

_THINK = ReasoningFormat("<think>", "</think>")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "think": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}

#: What a chat template holds that only one family's does -> the family's tool format; first wins.
_TEMPLATE_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<tool_call>", "hermes"),
)


def tool_format(name: str) -> ToolFormat:
    """Return the format of this name; raises ``InvalidRequest``."""
    return _known(TOOL_FORMATS, name, "tool_call_parser")


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of this name; raises ``InvalidRequest``."""
    return _known(REASONING_FORMATS, name, "reasoning_parser")


def choose_tool_format(chat_template: str) -> str | None:
    """Return the name of the tool format that a model's chat template speaks of, if any."""
    return next((name for mark, name in _TEMPLATE_MARKS if mark in chat_template), None)


def choose_reasoning_format(chat_template: str) -> str | None:
    """Return the name of the reasoning format that a model's chat template speaks of, if any."""
    if "[THINK]" in chat_template:
        return "mistral"
    return "think" if "</think>" in chat_template else None


def _known(formats: Mapping[str, Format], name: str, field: str) -> Format:
    if name not in formats:
        raise InvalidRequest(
            f"{field}: {name[:64]!r} is not known",
            field=field,
            fix=f"Use one of {', '.join(sorted(formats))}.",
        )
    return formats[name]
