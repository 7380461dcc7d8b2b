"""The kinds of jobs, told apart by their field ``kind``."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from tidemill.protocol.codec import as_message, decode_plain
from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.messages import GenerateRequest
from tidemill.protocol.values import AnyText, Count, Name, Tenant, Text, TokenIds
from tidemill.protocol.wire_model import Seconds, WireModel

#: Inputs of one embed job, documents of one score job.
MAX_INPUTS = 2048
#: Larger audio would hold up the server: it goes through the blob store.
MAX_AUDIO_BYTES = 256 * 1024
#: As much as OpenAI's API takes.
MAX_STORED_AUDIO_BYTES = 25 * 1024 * 1024
#: Of a transcription's prompt; a model looks at the last 223 tokens of it at most.
MAX_SPEECH_PROMPT_CHARS = 4096


class Kind(StrEnum):
    """What a job asks for."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    TRANSCRIBE = "transcribe"


class _KindRequest(WireModel):
    """What all kinds but *generate* share; see ``GenerateRequest`` for the common fields."""

    kind: str
    model: Name
    tenant: Tenant = "default"
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)

    @model_serializer(mode="wrap")
    def _with_kind(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # A default is left out on the wire, and a request without a kind is one of *generate*.
        return {"kind": self.kind, **serialize(self)}

    @property
    def stream(self) -> bool:
        """Whether somebody follows the token log live."""
        return False


class EmbedRequest(_KindRequest):
    """A job of kind *embed*: one vector per input, in the order of the inputs.

    An input is text or token ids; ``tokenizer_digest`` names the tokenizer that made these.
    ``dimensions`` keeps so many leading components; ``normalize`` gives each vector length 1, after
    that cut.  ``truncate`` cuts inputs that are too long for the model instead of refusing them.
    """

    kind: Literal["embed"] = "embed"
    inputs: Annotated[tuple[Text | TokenIds, ...], Field(min_length=1, max_length=MAX_INPUTS)]
    dimensions: Count | None = Field(default=None, ge=1)
    normalize: bool = True
    truncate: bool = False
    tokenizer_digest: Name | None = None


class ScoreRequest(_KindRequest):
    """A job of kind *score*: how well each document answers the query, one number each.

    A cross-encoder reads query and document together; of a model for embeddings the score is the
    cosine of both vectors.  ``activate=False`` returns what a cross-encoder computes before its
    activation function.  ``truncate`` cuts what is too long for the model, documents first.
    """

    kind: Literal["score"] = "score"
    query: Text
    documents: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_INPUTS)]
    activate: bool = True
    truncate: bool = False


class StoredAudio(WireModel):
    """A file of audio that its tenant has uploaded; the worker reads it from the blob store.

    ``seconds`` is its length as its header tells, or a guess.  ``sha256`` is of the content: the
    same content under another id is the same request.
    """

    file_id: Annotated[str, Field(pattern=r"^file-[0-9A-Za-z_]{1,64}$")]
    num_bytes: int = Field(ge=1, le=MAX_STORED_AUDIO_BYTES)
    seconds: Seconds
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TranscribeRequest(_KindRequest):
    """A job of kind *transcribe*: the text of speech.

    ``audio`` is the content of a file, for example WAV, FLAC, MP3 or Ogg, and ``stored`` names one
    that is too large for a message; there is one of both.  ``language`` is a code
    such as ``en``; without one the model finds it out.  The task ``translate`` writes English.
    ``prompt`` is text that may have come before, which settles names and style.  At
    ``temperature`` 0 windows that come out badly are decoded again at higher ones.
    """

    kind: Literal["transcribe"] = "transcribe"
    audio: Annotated[bytes, Field(strict=True, min_length=1, max_length=MAX_AUDIO_BYTES)] | None = (
        None
    )
    stored: StoredAudio | None = None
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: Annotated[AnyText, Field(max_length=MAX_SPEECH_PROMPT_CHARS)] = ""
    temperature: float = Field(default=0.0, ge=0.0, le=1.0)
    timestamps: Literal["none", "segment", "word"] = "segment"
    live: bool = True

    @property
    def stream(self) -> bool:
        """Whether somebody follows the segments live."""
        return self.live

    @model_validator(mode="after")
    def _one_source(self) -> "TranscribeRequest":
        if (self.audio is None) == (self.stored is None):
            raise ValueError("a job of speech has either audio or stored")
        return self


Request = GenerateRequest | EmbedRequest | ScoreRequest | TranscribeRequest

REQUESTS: Mapping[str, type[Request]] = {
    Kind.GENERATE: GenerateRequest,
    Kind.EMBED: EmbedRequest,
    Kind.SCORE: ScoreRequest,
    Kind.TRANSCRIBE: TranscribeRequest,
}


def kind_of(fields: Any) -> str:
    """Return the kind that a request's fields name, *generate* if none; it may be unknown."""
    kind = fields.get("kind", Kind.GENERATE) if isinstance(fields, Mapping) else Kind.GENERATE
    return str(kind)


def decode_request(data: bytes) -> Request:
    """Read a request of any kind; raises ``MalformedMessage`` or ``UnsupportedVersion``."""
    fields = decode_plain(data)
    kind = kind_of(fields)
    if kind not in REQUESTS:
        raise MalformedMessage(f"kind: {kind[:40]!r} is not one of {', '.join(REQUESTS)}")
    return as_message(fields, REQUESTS[kind])


#: The kinds of jobs that a model made for one of them can run.
_SERVED = {
    Kind.GENERATE: {Kind.GENERATE},
    Kind.EMBED: {Kind.EMBED, Kind.SCORE},
    Kind.SCORE: {Kind.SCORE},
    Kind.TRANSCRIBE: {Kind.TRANSCRIBE},
}


def serves(task: str, kind: str) -> bool:
    """Whether a model of this task runs jobs of this kind."""
    return Kind(kind) in _SERVED[Kind(task)]
