"""``/v1/completions``."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from tidemill.gateway.openai_models.base import ApiResponse
from tidemill.gateway.openai_models.sampling import GenerationRequest, Usage

_TOKENS = {"type": "array", "items": {"type": "integer"}}
#: Checked by hand: pydantic would try its alternatives on every one of a million token ids.
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKENS,
                {"type": "array", "items": _TOKENS},
            ],
            "description": "Text, texts, the token ids of a text, or of several.",
        }
    ),
]


class CompletionRequest(GenerationRequest):
    """Prompts to be continued."""

    prompt: PromptField
    max_tokens: int = Field(default=16, description="0 only with echo")
    echo: bool = False
    suffix: str | None = None
    logprobs: Annotated[int, Field(strict=True)] | None = None


class CompletionLogprobs(ApiResponse):
    """One entry per token in each list; null for a prompt's first, which follows nothing."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ApiResponse):
    """One continuation of one prompt; those of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(ApiResponse):
    """All continuations; also, with what is new, one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
