"""What requests for text say of sampling, scheduling and the form of the answer."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tidemill.gateway.openai_models.base import (
    CALLBACK,
    ApiRequest,
    ApiResponse,
    refuse_unserved,
)

#: What vLLM knows and what would not be the same without it, so that it is not ignored.
UNSERVED = {
    "prompt_embeds": "prompts are texts or token ids",
    "logits_processors": "none can be loaded",
    "vllm_xargs": "there are no extensions",
    "kv_transfer_params": "no worker takes over the cache of another",
    "ec_transfer_params": "no worker takes over the cache of another",
    "mm_processor_kwargs": "prompts have no images, sound or video",
    "media_io_kwargs": "prompts have no images, sound or video",
    "request_id": "the header X-Request-Id names a request",
    "watermarking": "outputs have no watermark",
}

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class StreamOptions(ApiRequest):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(ApiRequest):
    """Everything that completions and chats share.

    Names are OpenAI's and vLLM's; what is left out has the default of ``SamplingParams``.  Limits
    are checked where jobs are made, whose errors name them.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = Field(default=1, ge=1, description="Tokens of an event at least")

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    repetition_detection: dict[str, int] | None = None
    thinking_token_budget: Annotated[int, Field(strict=True, ge=-1)] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    priority: int | None = None
    deadline: float | None = Field(default=None, description="Seconds; not a job's end after it")
    cache_salt: str | None = None
    callback_url: str | None = Field(default=None, description=CALLBACK)
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, fields: Any) -> Any:
        return refuse_unserved(fields, UNSERVED)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.stream_options
        return options is not None and (options.include_usage or options.continuous_usage_stats)

    @property
    def tells_usage_always(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class PromptTokensDetails(ApiResponse):
    """How much of the prompt had been computed before."""

    cached_tokens: int


class Usage(ApiResponse):
    """Tokens of all choices and, once, of their prompts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
