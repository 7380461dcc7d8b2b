"""``/v1/embeddings``."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from tidemill.gateway.openai_models.base import CALLBACK, ApiRequest, ApiResponse

_TOKENS = {"type": "array", "items": {"type": "integer"}}
#: Checked by hand: pydantic would try its alternatives on every one of a million token ids.
InputField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKENS,
                {"type": "array", "items": _TOKENS},
            ],
            "description": "Text, texts, the token ids of a text, or of several; 2,048 at most.",
        }
    ),
]


class KindRequest(ApiRequest):
    """What embeddings, scores and speech share."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    deadline: float | None = Field(default=None, description="Seconds; not a job's end after it")
    callback_url: str | None = Field(default=None, description=CALLBACK)


class EncoderRequest(KindRequest):
    """What embeddings and scores share."""

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] = "right"
    metadata: dict[str, Any] | None = None


class EmbeddingRequest(EncoderRequest):
    """Inputs whose vectors are wanted."""

    input: InputField
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    use_activation: bool | None = Field(default=None, description="vLLM's name of `normalize`")
    messages: list[Any] | None = None


class Embedding(ApiResponse):
    """One vector; as text it is the base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class InputUsage(ApiResponse):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ApiResponse):
    """One vector per input, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: InputUsage
