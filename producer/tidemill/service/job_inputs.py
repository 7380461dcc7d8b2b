"""From a request of any kind to a checked one with its cost: pure, the same in every process."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from tidemill.protocol.codec import MAX_RESULT_BYTES
from tidemill.protocol.errors import ConfigError, InvalidRequest
from tidemill.protocol.messages import GenerateRequest, ModelCard
from tidemill.protocol.outcomes import FLOAT_BYTES
from tidemill.protocol.requests import (
    EmbedRequest,
    Request,
    ScoreRequest,
    TranscribeRequest,
    serves,
)
from tidemill.service.audio_length import audio_seconds
from tidemill.service.prompt import (
    BYTES_PER_TOKEN,
    PreparedPrompt,
    adapter_of,
    check_digest,
    check_vocabulary,
    most_tokens,
    prepare_ids,
    tokenize,
    validate,
)
from tidemill.service.sampling_defaults import with_defaults

if TYPE_CHECKING:  # an SDK without the tokenizer extra still checks token ids
    from tidemill.service.tokenizer import Tokenizer

#: A speech model reads 30 s of audio as 1,500 positions, however little of them is speech.
WINDOW_SECONDS = 30.0
TOKENS_PER_WINDOW = 1500
#: Tokens that a window can bring at most.
MAX_WINDOW_OUTPUT = 224
#: Room that a result leaves for everything but its vectors.
_RESULT_MARGIN = 64 * 1024


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What an encoder reads at once: token ids, and which of two texts each belongs to."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A request ready to be queued, its text replaced by token ids where that is possible."""

    request: Request
    prompt: PreparedPrompt


def check_kind(kind: str, card: ModelCard) -> None:
    """Raise ``InvalidRequest`` if the model does not run jobs of this kind."""
    if not serves(card.task, kind):
        raise InvalidRequest(
            f"model: {card.name!r} is a model for {card.task}, and this is a job of kind {kind}",
            field="model",
            fix=f"Name a model that serves jobs of kind {kind}.",
        )


def needs_tokenizer(request: Request) -> bool:
    """Whether the request holds text that must become tokens."""
    if isinstance(request, GenerateRequest):
        return request.prompt_ids is None
    if isinstance(request, EmbedRequest):
        return any(isinstance(item, str) for item in request.inputs)
    return isinstance(request, ScoreRequest)


def prepare_job(
    request: Request,
    tokenizer: "Tokenizer | None",
    card: ModelCard,
    salt: bytes,
    *,
    is_new: bool = False,
) -> PreparedJob:
    """Tokenise and check a request; ``salt`` is the tenant's.  Raises ``InvalidRequest``.

    ``is_new`` fills in the model's sampling defaults: the request comes from its caller.
    """
    check_kind(request.kind, card)
    if isinstance(request, GenerateRequest):
        ids = tokenize(request, tokenizer, card)
        if is_new:
            request = with_defaults(request, card, len(ids))
        prompt = prepare_ids(request, ids, card, salt)
        text = {"prompt": None, "messages": None}
        return PreparedJob(_with_digest(request, card, **text, prompt_ids=prompt.ids), prompt)
    if isinstance(request, TranscribeRequest):
        return PreparedJob(request, speech_cost(request))
    inputs = encoder_inputs(request, tokenizer, card)
    prompt = PreparedPrompt((), b"", sum(len(item.ids) for item in inputs), max_output=1)
    if isinstance(request, EmbedRequest):
        request = _with_digest(request, card, inputs=tuple(item.ids for item in inputs))
    return PreparedJob(request, prompt)


def validate_job(request: Request, card: ModelCard) -> None:
    """Check all that can be checked without a tokenizer; raises ``InvalidRequest``."""
    check_kind(request.kind, card)
    if isinstance(request, GenerateRequest):
        adapter_of(request, card)
        # The length of a text shows when it is tokenised.
        validate(request, len(request.prompt_ids or (0,)), card)
    elif isinstance(request, EmbedRequest):
        _check_embed(request, card)
        for index, item in enumerate(request.inputs):
            if not isinstance(item, str) and not request.truncate:
                _check_length(f"inputs.{index}", len(item), card)


def with_known_defaults(request: Request, card: ModelCard) -> Request:
    """Return a new request, whose text nobody tokenises yet, with the model's defaults."""
    if not isinstance(request, GenerateRequest):
        return request
    ids = request.prompt_ids
    return with_defaults(request, card, None if ids is None else len(ids))


def most_job_tokens(request: Request, card: ModelCard) -> int:
    """What a job of any kind counts against its tenant's quotas, in tokens."""
    if isinstance(request, GenerateRequest):
        return most_tokens(request, card)
    if isinstance(request, TranscribeRequest):
        return speech_cost(request).cost
    limit = card.max_model_len
    return sum(min(limit, size) for size in _sizes(request))


def bound_of_output(request: Request) -> int:
    """Return the bound on a job's output in tokens, 0 if it has none of its own."""
    if isinstance(request, GenerateRequest):
        return (request.params.max_tokens or 0) * request.params.num_outputs
    return speech_cost(request).max_output if isinstance(request, TranscribeRequest) else 1


def speech_cost(request: TranscribeRequest) -> PreparedPrompt:
    """Return the cost of a transcription: the positions of all windows of its audio."""
    stored = request.stored
    seconds = audio_seconds(request.audio or b"") if stored is None else stored.seconds
    num_windows = max(1, ceil(seconds / WINDOW_SECONDS))
    return PreparedPrompt(
        (), b"", num_windows * TOKENS_PER_WINDOW, max_output=num_windows * MAX_WINDOW_OUTPUT
    )


def encoder_inputs(
    request: EmbedRequest | ScoreRequest, tokenizer: "Tokenizer | None", card: ModelCard
) -> tuple[EncoderInput, ...]:
    """Return what the encoder reads, in order.

    Of a score job these are the pairs of query and document for a cross-encoder, else the query
    and then the documents.  Raises ``InvalidRequest``, or ``ConfigError`` without a tokenizer that
    is needed.
    """
    limit = card.max_model_len
    if isinstance(request, EmbedRequest):
        _check_embed(request, card)
        named = ((f"inputs.{i}", item) for i, item in enumerate(request.inputs))
        return tuple(
            _single(name, item, tokenizer, card, truncate=request.truncate) for name, item in named
        )
    if card.task != "score":
        texts = [("query", request.query)]
        texts += [(f"documents.{i}", text) for i, text in enumerate(request.documents)]
        return tuple(
            _single(name, text, tokenizer, card, truncate=request.truncate) for name, text in texts
        )
    needed = _needed(tokenizer)
    pairs = []
    for index, document in enumerate(request.documents):
        pair = needed.encode_pair(request.query, document, limit if request.truncate else None)
        _check_length(f"documents.{index}", len(pair.ids), card, what="with the query ")
        pairs.append(EncoderInput(pair.ids, pair.type_ids))
    return tuple(pairs)


def _single(
    name: str,
    item: str | tuple[int, ...],
    tokenizer: "Tokenizer | None",
    card: ModelCard,
    *,
    truncate: bool,
) -> EncoderInput:
    limit = card.max_model_len
    if isinstance(item, str):
        ids = _needed(tokenizer).encode_whole(item, limit if truncate else None)
    else:
        check_vocabulary(name, item, card)
        ids = item[:limit] if truncate else item
    _check_length(name, len(ids), card)
    return EncoderInput(ids)


def _needed(tokenizer: "Tokenizer | None") -> "Tokenizer":
    if tokenizer is None:
        raise ConfigError(
            "the inputs are text, and there is no tokenizer here",
            fix="Install tidemill[tokenizer], or send token ids.",
        )
    return tokenizer


def _check_embed(request: EmbedRequest, card: ModelCard) -> None:
    check_digest(request.tokenizer_digest, card)
    size = card.embedding_size
    if request.dimensions is not None and size and request.dimensions > size:
        raise InvalidRequest(
            f"dimensions: {request.dimensions} is more than the {size} of model {card.name!r}",
            field="dimensions",
            fix=f"Ask for {size} at most.",
        )
    room = MAX_RESULT_BYTES - _RESULT_MARGIN
    row_bytes = (request.dimensions or size) * FLOAT_BYTES
    if len(request.inputs) * row_bytes > room:
        raise InvalidRequest(
            f"inputs: {len(request.inputs)} vectors of {row_bytes} bytes exceed the {room} bytes"
            " of a result",
            field="inputs",
            fix=f"Send {room // row_bytes} at most in one job.",
        )


def _check_length(name: str, length: int, card: ModelCard, *, what: str = "") -> None:
    if length == 0:
        raise InvalidRequest(
            f"{name}: it has no tokens", field=name, fix="Send at least one token."
        )
    if length > card.max_model_len:
        raise InvalidRequest(
            f"{name}: {what}{length} tokens exceed the model's {card.max_model_len}",
            field=name,
            fix="Shorten it, or ask for truncate.",
        )


def _with_digest(request: Request, card: ModelCard, **fields: object) -> Request:
    changed = {"tokenizer_digest": card.tokenizer_digest, **fields}
    return request.model_copy(update=changed)


def _sizes(request: EmbedRequest | ScoreRequest) -> Iterable[int]:
    if isinstance(request, EmbedRequest):
        return map(_size, request.inputs)
    query = _size(request.query)
    return (query + _size(document) for document in request.documents)


def _size(item: str | tuple[int, ...]) -> int:
    """Return the length in tokens, of a text a guess."""
    return -(-len(item.encode()) // BYTES_PER_TOKEN) if isinstance(item, str) else len(item)
