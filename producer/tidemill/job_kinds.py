"""Jobs for embeddings, scores and speech, for ``submit_many`` and ``map``."""

from collections.abc import Sequence
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from pydantic import ValidationError

from tidemill._checks import shown
from tidemill._job_options import SharedOptions
from tidemill._request import ANY_MODEL, Draft, JobOptions, JobSpec, checked_key, checked_size
from tidemill._terms import TermOptions, take_terms
from tidemill.protocol.codec import encode
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import invalid_request
from tidemill.protocol.requests import (
    MAX_AUDIO_BYTES,
    MAX_INPUTS,
    EmbedRequest,
    Request,
    ScoreRequest,
    StoredAudio,
    TranscribeRequest,
)

#: Texts or lists of token ids.
Inputs = Sequence[str] | Sequence[Sequence[int]]

#: The content of a file, or where it is.
Audio = bytes | bytearray | memoryview | str | PathLike[str]

_FLAGS = frozenset({"normalize", "truncate", "activate", "live"})


class KindOptions(TermOptions, total=False):
    """What jobs of all kinds but *generate* share beside their terms."""

    model: str | None
    priority: int
    idempotency_key: str | None


class EmbedOptions(KindOptions, total=False):
    """Of ``EmbedRequest``: leading components to keep, length 1 or not, cut long inputs or not."""

    dimensions: int | None
    normalize: bool
    truncate: bool


class ScoreOptions(KindOptions, total=False):
    """Of ``ScoreRequest``: apply the model's activation function or not, cut long texts or not."""

    activate: bool
    truncate: bool


class TranscribeOptions(KindOptions, total=False):
    """Of ``TranscribeRequest``."""

    language: str | None
    task: Literal["transcribe", "translate"]
    prompt: str
    temperature: float
    timestamps: Literal["none", "segment", "word"]
    live: bool


class KindSpec(JobSpec):
    """A job of another kind than *generate*; base of those below."""

    kind: type[Request]

    def __init__(self, fields: dict[str, Any], options: KindOptions) -> None:
        super().__init__("-")
        self._fields = fields
        self._kind_options = options

    @property
    def idempotency_key(self) -> str | None:
        """What finds the same job when this is submitted again, if anything does."""
        return self._kind_options.get("idempotency_key")

    @property
    def callback_url(self) -> str | None:
        """Where its end is told, as the caller says."""
        return self._kind_options.get("callback_url")

    def with_defaults(self, common: JobOptions) -> JobSpec:
        """Return this spec with those common options that its kind has too."""
        return self._with({**_known(common), **self._kind_options})

    def with_options(self, forced: JobOptions) -> JobSpec:
        """Return this spec with those options that its kind has too in place of its own."""
        return self._with({**self._kind_options, **_known(forced)})

    def _with(self, options: KindOptions) -> JobSpec:
        merged = object.__new__(type(self))
        KindSpec.__init__(merged, self._fields, options)
        return merged

    def draft(self, tenant: str, shared: SharedOptions | None = None) -> Draft:
        """Check everything that can be checked without the model; raises ``InvalidRequest``."""
        fields: dict[str, Any] = {**self._kind_options}
        model, key = fields.pop("model", None), checked_key(fields.pop("idempotency_key", None))
        terms = take_terms(fields)
        _check_kinds({"model": model, **fields})
        named = ANY_MODEL if model is None else model
        try:
            request = self.kind.model_validate(
                {"model": named, "tenant": tenant, **self._fields, **fields}
            )
        except ValidationError as error:
            raise invalid_request(error) from error
        body = checked_size(request)
        digest = (
            sha256(self._identity_of(request, body) + encode(terms)).hexdigest() if key else "-"
        )
        return Draft(request, terms, model, key, digest, len(body))

    def _identity_of(self, request: Request, body: bytes) -> bytes:
        """Return what requests with the same idempotency key must have in common."""
        return body


class EmbedSpec(KindSpec):
    """One text, the token ids of one, or a list of either: a vector for each."""

    kind = EmbedRequest

    def __init__(self, inputs: str | Sequence[int] | Inputs, **options: Unpack[EmbedOptions]):
        super().__init__({"inputs": _inputs(inputs)}, options)


class ScoreSpec(KindSpec):
    """A query and documents: how well each of them answers it."""

    kind = ScoreRequest

    def __init__(
        self, query: str, documents: str | Sequence[str], **options: Unpack[ScoreOptions]
    ) -> None:
        given = (documents,) if isinstance(documents, str) else tuple(documents)
        super().__init__({"query": query, "documents": given}, options)


class TranscribeSpec(KindSpec):
    """Audio, as the content of a file, its path, or a stored one: the text of what is said."""

    kind = TranscribeRequest

    def __init__(self, audio: Audio | StoredAudio, **options: Unpack[TranscribeOptions]) -> None:
        is_stored = isinstance(audio, StoredAudio)
        super().__init__({"stored": audio} if is_stored else {"audio": _audio(audio)}, options)

    def _identity_of(self, request: Request, body: bytes) -> bytes:
        stored = request.stored if isinstance(request, TranscribeRequest) else None
        if stored is None:
            return body
        # Whoever sends the same content again has uploaded it again.
        unnamed = stored.model_copy(update={"file_id": "file-0"})
        return encode(request.model_copy(update={"stored": unnamed}))


def _known(options: JobOptions) -> KindOptions:
    names = KindOptions.__annotations__.keys() & options.keys()
    return cast(KindOptions, {name: options[name] for name in names})  # type: ignore[literal-required]


def _inputs(inputs: Any) -> tuple[Any, ...]:
    if isinstance(inputs, str):
        return (inputs,)
    if not isinstance(inputs, Sequence) or isinstance(inputs, bytes | bytearray):
        raise InvalidRequest(
            f"inputs: {type(inputs).__name__} is neither text nor a list",
            field="inputs",
            fix="Give text, token ids, or a list of either.",
        )
    if inputs and type(inputs[0]) is int:
        return (tuple(inputs),)
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"inputs: it has {len(inputs)} items, the limit is {MAX_INPUTS}", field="inputs"
        )
    return tuple(item if isinstance(item, str) else tuple(item) for item in inputs)


def _audio(audio: Any) -> bytes:
    if isinstance(audio, str | PathLike):
        return _read(Path(audio))
    if not isinstance(audio, bytes | bytearray | memoryview):
        raise InvalidRequest(
            f"audio: {type(audio).__name__} is neither bytes nor a path", field="audio"
        )
    _check_size(len(audio))
    return bytes(audio)


def _read(path: Path) -> bytes:
    try:
        _check_size(path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"audio: {path} cannot be read: {error.strerror or error}", field="audio"
        ) from error


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_AUDIO_BYTES:
        raise InvalidRequest(
            f"audio: {num_bytes} bytes, the limit is {MAX_AUDIO_BYTES}",
            field="audio",
            fix="Compress it as 16 kHz mono MP3, Ogg or FLAC, or send it to a gateway.",
        )


def _check_kinds(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _FLAGS and not isinstance(value, bool):
            raise InvalidRequest(f"{name}: {shown(value)} is not True or False", field=name)
        if name in ("priority", "temperature", "dimensions") and isinstance(value, bool | str):
            raise InvalidRequest(f"{name}: {shown(value)} is not a number", field=name)
        if name == "model" and not isinstance(value, str | None):
            raise InvalidRequest(f"model: {type(value).__name__} is not text", field="model")
