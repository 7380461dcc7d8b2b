"""``/v1/responses``, as OpenAI's clients send and read it."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from tidemill.gateway.openai_models.base import ApiRequest, ApiResponse
from tidemill.gateway.openai_models.sampling import Seed
from tidemill.gateway.openai_models.streaming import EVENTS

#: Checked where the conversation is made, which names the item and field that is wrong.
InputField = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class ResponseRequest(ApiRequest):
    """A conversation to be continued."""

    model: str | None = None
    input: InputField
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    background: bool = False
    store: bool = True

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    deadline: float | None = Field(default=None, description="Seconds; not a job's end after it")
    cache_salt: str | None = None
    callback_url: str | None = None


class InputTokenCount(ApiResponse):
    """Tokens that the model would read."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseError(ApiResponse):
    """Why a response failed."""

    code: str
    message: str


class InputTokensDetails(ApiResponse):
    """How much of the input had been computed before."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ApiResponse):
    """Tokens of reasoning are not counted apart: always 0."""

    reasoning_tokens: int = 0


class ResponseUsage(ApiResponse):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(ApiResponse):
    """A response: messages, reasoning and function calls are items of its ``output``."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None = None
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(ApiResponse):
    """A response that is forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(ApiResponse):
    """Items of an input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


STREAM_OR_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response or, with `stream`, server-sent events from"
        " `response.created` to `response.completed`, `.incomplete` or `.failed`",
        "content": EVENTS,
    }
}
