"""How a chat's output is read, as plain values: whoever reads it later needs no model for it."""

from collections.abc import Mapping
from typing import Any

from tidemill.openai.chat import ChatFormats, ChatJob
from tidemill.openai.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from tidemill.openai.tools import CallMode, Tool, ToolChoice
from tidemill.protocol.structured import StructuredOutput

#: More than any marker that opens reasoning has.
_TAIL_CHARS = 64


def plain_reading(job: ChatJob) -> dict[str, Any]:
    """Return what ``stored_chat_job`` needs to read outputs as ``job`` does."""
    return {
        "mode": str(job.choice.mode),
        "tools": [[tool.name, dict(tool.parameters)] for tool in job.choice.tools],
        "tool_format": _name_of(job.formats.tools, TOOL_FORMATS),
        "reasoning_format": _name_of(job.formats.reasoning, REASONING_FORMATS),
        "structured": job.structured is not None,
        "tail": job.prompt.rstrip()[-_TAIL_CHARS:],
    }


def stored_chat_job(reading: Mapping[str, Any]) -> ChatJob:
    """Return a job whose parser reads outputs as that of the job stored; nothing else is of it."""
    tools, reasoning = reading["tool_format"], reading["reasoning_format"]
    return ChatJob(
        prompt=reading["tail"],
        prompt_ids=(),
        structured=StructuredOutput(json_object=True) if reading["structured"] else None,
        choice=ToolChoice(
            CallMode(reading["mode"]),
            tuple(Tool(name, parameters=parameters) for name, parameters in reading["tools"]),
        ),
        formats=ChatFormats(
            None if tools is None else tool_format(tools),
            None if reasoning is None else reasoning_format(reasoning),
        ),
    )


def _name_of(wanted: object, formats: Mapping[str, object]) -> str | None:
    return next((name for name, known in formats.items() if known is wanted), None)
