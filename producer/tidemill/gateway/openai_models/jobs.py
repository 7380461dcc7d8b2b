"""``/v1/jobs``: what Tidemill has beside OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, Field, WithJsonSchema, model_validator

from tidemill.gateway.openai_models.base import CALLBACK, ApiRequest, ApiResponse
from tidemill.gateway.openai_models.embeddings import KindRequest
from tidemill.gateway.openai_models.sampling import Usage
from tidemill.gateway.openai_models.streaming import EVENTS

Kind = Literal["generate", "embed", "score", "transcribe"]
JobStateName = Literal[
    "delayed", "queued", "running", "done", "failed", "cancelled", "expired", "dead"
]


class JobRequest(ApiRequest):
    """A job that nobody waits for.

    Further fields are those of the endpoint of its kind: of `/v1/completions`, with `messages` of
    `/v1/chat/completions`, of `/v1/embeddings`, of `/v1/rerank` (`query`, `documents`), and for
    speech `file_id` or `audio` (base64), `language`, `task`, `prompt`, `temperature`, `timestamps`.
    """

    kind: Kind = "generate"
    stream: bool = Field(default=True, description="False spares the broker work")
    delay: float | None = Field(default=None, description="Seconds until it may run")
    max_queue: float | None = Field(default=None, description="Longest wait for a worker")
    stall_timeout: float | None = Field(default=None, description="Longest wait for a token")
    max_retries: int | None = None
    batch: str | None = None
    callback_url: str | None = Field(default=None, description=CALLBACK)
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _note_unknown(self) -> "JobRequest":
        # The model of its kind does; here most fields look unknown.
        return self


class SpeechJobRequest(KindRequest):
    """The further fields of a job for speech."""

    file_id: str | None = None
    audio: Annotated[Base64Bytes | None, WithJsonSchema({"type": "string"})] = None
    language: str | None = Field(default=None, pattern="^[a-z]{2,3}$")
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: str = ""
    temperature: float = Field(default=0.0, ge=0.0, le=1.0)
    timestamps: Literal["none", "segment", "word"] = "segment"


class JobObject(ApiResponse):
    """A job; times are in seconds, of the Unix clock, and null if not reached or not set."""

    id: str
    object: Literal["job"] = "job"
    status: str
    model: str
    priority: int
    created_at: float
    ready_at: float | None = None
    deadline_at: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    num_tokens: int
    attempts: int
    num_retries: int
    max_retries: int
    finish_reason: str | None = None
    error: str | None = None
    batch: str | None = None
    parent: str | None = None
    metadata: dict[str, str] | None = None


class JobList(ApiResponse):
    """A page of jobs, the newest first.

    The next one is `after` the `last_id`; with a filter a page may have fewer jobs than asked for.
    """

    object: Literal["list"] = "list"
    data: list[JobObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SubmittedJob(JobObject):
    """A job that was accepted, or that an idempotency key has found."""

    is_new: bool
    estimated_wait: float | None = None


class JobChoice(ApiResponse):
    """One output."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] | None = None


class JobTranscript(ApiResponse):
    """What was said, and when."""

    language: str
    seconds: float
    segments: list[dict[str, Any]]


class JobResult(ApiResponse):
    """Everything that a job has produced; partial unless its status is `done`."""

    id: str
    object: Literal["job.result"] = "job.result"
    status: str
    error: str | None = None
    choices: list[JobChoice] | None = None
    embeddings: list[list[float]] | None = None
    scores: list[float] | None = None
    transcript: JobTranscript | None = None
    usage: Usage


STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events `token`, whose ids resume the stream, then one `end`"
        " with the last tokens",
        "content": EVENTS,
    },
    204: {"description": "Nothing follows the `Last-Event-ID`"},
}
NOT_YET: dict[int | str, dict[str, Any]] = {202: {"model": JobObject, "description": "Not yet"}}
