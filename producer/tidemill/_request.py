"""From what a caller says to a job that can be queued; pure, shared by both clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from pydantic import TypeAdapter, ValidationError

from tidemill._checks import shown
from tidemill._job_options import SharedOptions
from tidemill._structured import StructuredOptions
from tidemill._terms import TermOptions
from tidemill.protocol.calls import NewJob
from tidemill.protocol.codec import MAX_ARRAY_LEN, MAX_MESSAGE_BYTES, encode
from tidemill.protocol.errors import InvalidRequest, UnknownModel
from tidemill.protocol.keys import RESERVED_KEYS
from tidemill.protocol.messages import (
    ChatMessage,
    GenerateRequest,
    JobTerms,
    ModelCard,
    invalid_request,
)
from tidemill.protocol.requests import Request
from tidemill.protocol.sampling import RepetitionDetection, SamplingParams
from tidemill.protocol.values import Tenant
from tidemill.service.job_inputs import (
    bound_of_output,
    most_job_tokens,
    needs_tokenizer,
    prepare_job,
    validate_job,
    with_known_defaults,
)
from tidemill.service.prompt import PreparedPrompt

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer

#: Text, token ids, or the messages of a conversation.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str] | ChatMessage]

MAX_IDEMPOTENCY_KEY_CHARS = 256

#: Stands for "the only model that is served" in the digest of a request that names none.
ANY_MODEL = "-"

_TENANT: TypeAdapter[str] = TypeAdapter(Tenant)


class OneAnswerOptions(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keyword arguments, but for the number of answers."""

    best_of: int | None
    use_beam_search: bool
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int]
    repetition_detection: RepetitionDetection | Mapping[str, int] | None
    thinking_token_budget: int | None


class SamplingOptions(OneAnswerOptions, total=False):
    """The fields of ``SamplingParams`` as keyword arguments."""

    n: int


class RunOptions(SamplingOptions, TermOptions, StructuredOptions, total=False):
    """How a job samples, what its answer looks like, when it runs, and how often it is tried."""


class QueueOptions(TypedDict, total=False):
    """Whom a job is for, and how it is queued."""

    model: str | None
    params: SamplingParams | None
    priority: int
    idempotency_key: str | None
    cache_salt: str | None
    prefix_id: str | None
    lora: str | None
    stream: bool


class JobOptions(RunOptions, QueueOptions, total=False):
    """Everything that ``submit`` takes beside the prompt."""


class CandidateOptions(OneAnswerOptions, TermOptions, StructuredOptions, QueueOptions, total=False):
    """Everything that ``submit_best_of`` takes beside the prompt and the number of jobs."""


class JobSpec:
    """A prompt with options of its own, for ``map`` and ``submit_many``."""

    def __init__(self, prompt: Prompt, **options: Unpack[JobOptions]) -> None:
        self.prompt = prompt
        self.options = options

    @property
    def idempotency_key(self) -> str | None:
        """What finds the same job when this is submitted again, if anything does."""
        return self.options.get("idempotency_key")

    @property
    def has_key(self) -> bool:
        """Whether submitting this again would find the same job."""
        return self.idempotency_key is not None

    @property
    def has_callback(self) -> bool:
        """Whether somebody is told of its end by a webhook of its own."""
        return self.callback_url is not None

    @property
    def callback_url(self) -> str | None:
        """Where its end is told, as the caller says."""
        return self.options.get("callback_url")

    @classmethod
    def of(cls, item: "Prompt | JobSpec", common: JobOptions) -> "JobSpec":
        """Return ``item`` as a spec; its own options go before the common ones."""
        if not isinstance(item, JobSpec):
            return cls(item, **common)
        return item.with_defaults(common)

    def with_defaults(self, common: JobOptions) -> "JobSpec":
        """Return this spec with the common options for what it does not say itself."""
        merged: JobOptions = {**common, **self.options}
        return JobSpec(self.prompt, **merged)

    def with_options(self, forced: JobOptions) -> "JobSpec":
        """Return this spec with options in place of its own."""
        merged: JobOptions = {**self.options, **forced}
        return JobSpec(self.prompt, **merged)

    def draft(self, tenant: str, shared: SharedOptions | None = None) -> "Draft":
        """Check everything that can be checked without the model; raises ``InvalidRequest``.

        ``shared`` are the options of further jobs of the same call.
        """
        return make_draft(self.prompt, self.options, tenant, shared or SharedOptions())


@dataclass(frozen=True, slots=True)
class Draft:
    """A valid request as its caller gave it: the model may be open."""

    request: Request
    terms: JobTerms
    model: str | None
    idempotency_key: str
    body_digest: str
    num_bytes: int

    @property
    def has_tokens(self) -> bool:
        """Whether there is no text that must become tokens."""
        return not needs_tokenizer(self.request)


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if it may be one; raises ``InvalidRequest``."""
    try:
        return _TENANT.validate_python(tenant, strict=True)
    except ValidationError as error:
        raise InvalidRequest(
            f"tenant: {shown(tenant)!r} is not a tenant",
            field="tenant",
            fix="Use 1 to 64 letters, digits, dots, dashes and underscores.",
        ) from error


def make_draft(prompt: Prompt, options: JobOptions, tenant: str, shared: SharedOptions) -> Draft:
    """Check everything that can be checked without knowing the model; raises ``InvalidRequest``."""
    key = checked_key(options.get("idempotency_key"))
    checked = shared.check(options)
    try:
        request = GenerateRequest(
            model=ANY_MODEL if checked.model is None else checked.model,
            tenant=tenant,
            params=checked.params,
            structured=checked.structured,
            **_prompt_fields(prompt),
            **checked.own,
        )
    except ValidationError as error:
        raise invalid_request(error) from error
    body = checked_size(request)
    # The same key with other terms is another job too.
    digest = sha256(body + encode(checked.terms)).hexdigest() if key else "-"
    return Draft(request, checked.terms, checked.model, key, digest, len(body))


def one_key_for_many() -> InvalidRequest:
    """Return the error for giving all jobs of a ``map`` the same idempotency key."""
    return InvalidRequest(
        "idempotency_key: many jobs cannot share one",
        field="idempotency_key",
        fix="Give key_prefix=..., or each item its own with JobSpec(prompt, idempotency_key=...).",
    )


def choose_model(names: Sequence[str]) -> str:
    """Return the only model that is served; raises ``UnknownModel`` or ``InvalidRequest``."""
    if not names:
        raise UnknownModel(
            "model: no worker serves a model",
            field="model",
            fix="Start one with `tidemill up`, or wait until its workers are ready.",
        )
    if len(names) > 1:
        raise InvalidRequest(
            f"model: several are served: {', '.join(names)}",
            field="model",
            fix="Say which one with model=...",
        )
    return names[0]


def unknown_model(name: str, names: Sequence[str]) -> UnknownModel:
    """Return the error for a model without a card, given the names of those that have one."""
    served = f"Known models: {', '.join(names)}." if names else "Start workers with `tidemill up`."
    return UnknownModel(f"model: no worker serves {name[:256]!r}", field="model", fix=served)


def make_job(
    job_id: str, draft: Draft, card: ModelCard, salt: bytes, tokenizer: "Tokenizer | None"
) -> NewJob:
    """Return what goes on the queue of the model of ``card``.

    A seed that is not given stays open: the job's id determines it, so whoever submits the same job
    again, also under an id that its idempotency key found, asks for the same tokens.  Without
    ``tokenizer`` a text stays text, and its length is checked later.  Raises ``InvalidRequest`` if
    the model cannot run it.
    """
    request = _for_model(draft, card)
    if needs_tokenizer(request) and tokenizer is None:
        request = with_known_defaults(request, card)
        prompt = PreparedPrompt((), b"", 0, max_output=bound_of_output(request))
        validate_job(request, card)
    else:
        prepared = prepare_job(request, tokenizer, card, salt, is_new=True)
        request, prompt = prepared.request, prepared.prompt
    checked_size(request)
    return NewJob(
        job_id=job_id,
        request=request,
        routing_key=prompt.routing_key,
        cost=prompt.cost,
        num_tokens=most_job_tokens(request, card),
        terms=draft.terms,
        idempotency_key=draft.idempotency_key,
        body_digest=draft.body_digest,
        max_output=prompt.max_output,
        hint_depth=prompt.hint_depth,
    )


def has_adapter(card: ModelCard, name: str) -> bool:
    """Whether a job that names ``name`` as its model means an adapter of this one."""
    return any(adapter.name == name for adapter in card.adapters)


def _for_model(draft: Draft, card: ModelCard) -> Request:
    request = draft.request.model_copy(update={"model": card.name})
    is_named = draft.model is not None and draft.model != card.name
    if is_named and isinstance(request, GenerateRequest) and request.lora is None:
        return request.model_copy(update={"lora": draft.model})
    return request


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(
            f"prompt: {type(prompt).__name__} is not a prompt",
            field="prompt",
            fix="Give text, a list of token ids or a list of messages.",
        )
    if not prompt:
        raise InvalidRequest("prompt: it is empty", field="prompt", fix="Give at least one token.")
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if len(prompt) > MAX_ARRAY_LEN:
        raise InvalidRequest(
            f"prompt: it has {len(prompt)} items, the limit is {MAX_ARRAY_LEN}", field="prompt"
        )
    if bool in set(map(type, prompt)):
        raise InvalidRequest("prompt: True and False are not token ids", field="prompt")
    is_chat = isinstance(prompt[0], Mapping | ChatMessage)
    return {"messages" if is_chat else "prompt_ids": tuple(prompt)}


def checked_key(key: str | None) -> str:
    """Return the idempotency key, "" for none; raises ``InvalidRequest``."""
    if key is None:
        return ""
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY_CHARS:
        raise InvalidRequest(
            f"idempotency_key: it must have 1 to {MAX_IDEMPOTENCY_KEY_CHARS} characters",
            field="idempotency_key",
        )
    _check_key_text(key)
    return key


def _check_key_text(key: str) -> None:
    if key.startswith(RESERVED_KEYS):
        raise InvalidRequest(
            f"idempotency_key: it begins with {' or '.join(RESERVED_KEYS)}, which is reserved",
            field="idempotency_key",
            fix="Begin it otherwise.",
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"idempotency_key: its character {error.start} is half of a surrogate pair",
            field="idempotency_key",
            fix="Give valid Unicode.",
        ) from error


def checked_size(request: Request) -> bytes:
    """Return the encoded request; raises ``InvalidRequest`` if it is too large for the wire."""
    body = encode(request)
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"prompt: the request has {len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}",
            field="prompt",
            fix="Shorten the prompt.",
        )
    return body
