"""``/v1/batches``."""

from typing import Any, Literal

from pydantic import Field

from tidemill.gateway.openai_models.base import ApiRequest, ApiResponse


class BatchRequest(ApiRequest):
    """A batch to be worked off; its input is a file of the purpose ``batch``."""

    input_file_id: str
    endpoint: str
    completion_window: str = Field(default="24h", description="From 1m to 30d, such as 90m")
    metadata: dict[str, Any] | None = None
    callback_url: str | None = Field(
        default=None, description="Gets a signed webhook when the batch has ended"
    )
    output_expires_after: dict[str, Any] | None = Field(
        default=None, description='Such as {"anchor": "created_at", "seconds": 86400}'
    )


class BatchError(ApiResponse):
    """What is wrong with a line of the input."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(ApiResponse):
    """All that is wrong with the input."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(ApiResponse):
    """How many requests there are, and how many of them were answered or failed so far."""

    total: int
    completed: int
    failed: int


class CachedTokens(ApiResponse):
    """Input tokens by where they came from."""

    cached_tokens: int


class ReasoningTokens(ApiResponse):
    """Output tokens by what they are for."""

    reasoning_tokens: int


class BatchUsage(ApiResponse):
    """Tokens of the requests that were answered so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(ApiResponse):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(ApiResponse):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
