"""Pieces of an assistant's message, as they become certain."""

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call; ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain: more content, more reasoning, whole tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: "Delta") -> "Delta":
        return Delta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )


def call_id(job_id: str, index: int) -> str:
    """Return the id of a job's tool call; whoever parses the output again finds the same."""
    return f"call_{sha256(f'{job_id}/{index}'.encode()).hexdigest()[:24]}"
