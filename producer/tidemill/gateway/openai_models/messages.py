"""``/v1/messages``, as Anthropic's clients send and read it."""

from typing import Any, Literal

from pydantic import Field

from tidemill.gateway.openai_models.base import CALLBACK, ApiRequest, ApiResponse
from tidemill.gateway.openai_models.chat import MessagesField
from tidemill.gateway.openai_models.sampling import Seed


class CountedRequest(ApiRequest):
    """A conversation, without what is asked of the answer."""

    model: str | None = None
    messages: MessagesField
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountedRequest):
    """A conversation to be continued; a last message of the assistant is gone on with."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Seed | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    deadline: float | None = None
    cache_salt: str | None = None
    callback_url: str | None = Field(default=None, description=CALLBACK)


class MessageUsage(ApiResponse):
    """Tokens; those of the prompt that had been computed before are told apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class Message(ApiResponse):
    """The answer: blocks of text, of thinking, and of tools to be used."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[dict[str, Any]]
    model: str
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ApiResponse):
    """Tokens of a conversation as the model reads it."""

    input_tokens: int
