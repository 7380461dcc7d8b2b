"""``/v1/audio``: the form of a request, and the answers."""

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from tidemill.gateway.openai_models.base import CALLBACK, ApiResponse, refuse_unserved
from tidemill.gateway.openai_models.embeddings import KindRequest
from tidemill.gateway.openai_models.streaming import EVENTS

AudioFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
Granularity = Literal["segment", "word"]


#: What vLLM knows, and what would come out differently.
_UNSERVED = dict.fromkeys(
    (
        *("hotwords", "max_completion_tokens", "seed", "top_p", "top_k", "min_p"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "vllm_xargs"),
    ),
    "a model of speech decodes as it was made to, at the temperature that is asked for",
)


#: What asks for nothing of that; forms say it in text.
_NEUTRAL = {
    **dict.fromkeys(("top_p", "repetition_penalty"), (1.0,)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), (0.0,)),
    "top_k": (0.0, -1.0),
}


class TranscriptionRequest(KindRequest):
    """Everything of the form but the file; ``language`` is a code such as ``en``."""

    language: str | None = Field(default=None, pattern="^[a-z]{2,3}$")
    prompt: str = ""
    response_format: AudioFormat = "json"
    temperature: float = Field(default=0.0, ge=0.0, le=1.0)
    timestamp_granularities: list[Granularity] | None = None
    stream: bool = False
    stream_include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, fields: Any) -> Any:
        asked = {name: value for name, value in fields.items() if not _is_neutral(name, value)}
        refuse_unserved(asked, _UNSERVED)
        return fields


def _is_neutral(name: str, value: Any) -> bool:
    try:
        return float(value) in _NEUTRAL.get(name, ())
    except (TypeError, ValueError):
        return False


def form_of(*, translates: bool) -> dict[str, Any]:
    """Return the description of the body, which is read as it comes and so not by FastAPI."""
    text = {"type": "string"}
    fields: dict[str, Any] = {
        "file": {"type": "string", "format": "binary", "description": "25 MiB at most"},
        "model": text,
        "prompt": text,
        "response_format": {"type": "string", "enum": get_args(AudioFormat)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "timestamp_granularities[]": {
            "type": "array",
            "items": {"type": "string", "enum": get_args(Granularity)},
        },
        "stream": {"type": "boolean"},
        "priority": {"type": "integer"},
        "deadline": {"type": "number"},
        "callback_url": {"type": "string", "description": CALLBACK},
    }
    if not translates:
        fields["language"] = text
    schema = {"type": "object", "required": ["file"], "properties": fields}
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    }


AUDIO_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What is said, in the form of `response_format`; with `stream`,"
        " server-sent events `transcript.text.delta` and `transcript.text.done`",
        "content": {
            "text/plain": {"schema": {"type": "string"}},
            **EVENTS,
        },
    }
}


class AudioUsage(ApiResponse):
    """How long the audio is, in seconds."""

    type: Literal["duration"] = "duration"
    seconds: float


class SpokenWord(ApiResponse):
    """One word and its time in seconds."""

    word: str
    start: float
    end: float


class SpokenSegment(ApiResponse):
    """A stretch of speech between two timestamps, in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcription(ApiResponse):
    """What is said; all but the text is of ``verbose_json`` alone."""

    text: str
    usage: AudioUsage
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[SpokenSegment] | None = None
    words: list[SpokenWord] | None = None
