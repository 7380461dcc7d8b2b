"""``/v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from tidemill.gateway.openai_models.base import ApiResponse
from tidemill.gateway.openai_models.sampling import GenerationRequest, Usage

#: Checked where the prompt is made, which names the message and field that is wrong.
MessagesField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string"},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "null"},
                            {"type": "array", "items": {"type": "object"}},
                        ]
                    },
                    "tool_calls": {"type": "array", "items": {"type": "object"}},
                    "tool_call_id": {"type": "string"},
                },
            },
        }
    ),
]


class ChatRequest(GenerationRequest):
    """A conversation to be continued."""

    messages: MessagesField
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    echo: bool = False


class TokenLogprob(ApiResponse):
    """One token's natural logarithm of probability; ``bytes`` may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TokenLogprob):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(ApiResponse):
    """One entry per token, reasoning and tool calls included."""

    content: list[TokenLogprobs]
    refusal: None = None


class FunctionCall(ApiResponse):
    """``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(ApiResponse):
    """One call; in a stream it comes whole."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(ApiResponse):
    """What the model wrote; reasoning is told under the names of both conventions."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(ApiResponse):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ApiResponse):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    metadata: dict[str, Any] | None = None
