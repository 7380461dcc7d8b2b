"""The messages of the wire: frozen pydantic models, unknown fields forbidden."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from tidemill.protocol.complaints import complaint_of
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.kv_use import KvUse
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE, ROUTING_HASH_BYTES
from tidemill.protocol.sampling import DEFAULT_MAX_LOGPROBS, DEFAULT_MAX_N, SamplingParams
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill.protocol.structured import StructuredOutput
from tidemill.protocol.values import (
    AnyText,
    Metadata,
    Name,
    OptionalUrl,
    ShortName,
    Tenant,
    Text,
    TokenIds,
)
from tidemill.protocol.wire_model import Natural, WireModel

#: Longest delay, deadline and time limit: 30 days.
MAX_DURATION_MS = 30 * 24 * 3600 * 1000
#: Last Unix time in ms that a job may be scheduled for, in the year 2255.
MAX_TIME_MS = 9 * 10**12
DEFAULT_RETRIES = 3
MAX_RETRIES = 100

#: LoRA adapters of one model.
MAX_ADAPTERS = 1024


Duration = Annotated[int, Field(strict=True, ge=0, le=MAX_DURATION_MS)]


class ChatMessage(WireModel):
    """One turn of a conversation."""

    role: Name
    content: AnyText


class GenerateRequest(WireModel):
    """A job of kind *generate*: exactly one of prompt, prompt_ids and messages.

    ``tokenizer_digest`` names the tokenizer that made ``prompt_ids`` or, for text, the one it was
    meant for; a worker with another refuses the job.  ``stream=False`` lets the worker write the
    token log less often.  ``priority``: lower is sooner; < 0 interactive, 0 standard, > 0 batch.
    ``prefix_id`` names what the prompt begins with: the scheduler keeps the tenant's jobs of one
    name together, also where their tokens cannot tell.  ``structured`` is what the answer must look
    like, ``lora`` the name of an adapter that changes the model's weights for this job.
    """

    kind: Literal["generate"] = "generate"
    model: Name
    prompt: Text | None = None
    prompt_ids: TokenIds | None = None
    messages: tuple[ChatMessage, ...] | None = None
    params: SamplingParams = SamplingParams()
    tenant: Tenant = "default"
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: ShortName | None = None
    prefix_id: ShortName | None = None
    tokenizer_digest: Name | None = None
    stream: bool = True
    structured: StructuredOutput | None = None
    lora: ShortName | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        given = [p for p in (self.prompt, self.prompt_ids, self.messages) if p is not None]
        if len(given) != 1:
            raise ValueError("exactly one of prompt, prompt_ids and messages is needed")
        if not given[0]:
            raise ValueError("the prompt is empty")
        if self.structured is not None and self.params.use_beam_search:
            raise ValueError("a beam search keeps to no structure")
        return self


class JobTerms(WireModel):
    """When a job may and must run, and how often it is tried; all times are in ms, 0 for none.

    ``delay_ms`` counts from the submission, ``not_before_ms`` is a Unix time; the later holds.
    ``deadline_ms`` counts from the submission and bounds everything, retries included.
    ``max_queue_ms`` bounds the wait for the first worker, from when the job may run;
    ``stall_ms`` the time a running job may take for its next token, from its dispatch on, so that
    a wait inside the worker counts.  A job that fails in a way
    that may pass is tried again up to ``max_retries`` times.  ``batch`` names a group of the
    tenant's jobs that can be counted and cancelled together.  ``callback_url`` is told of the end.
    ``metadata`` are texts by name that are kept with the job for its owner.
    """

    delay_ms: Duration = 0
    not_before_ms: int = Field(default=0, ge=0, le=MAX_TIME_MS)
    deadline_ms: Duration = 0
    max_queue_ms: Duration = 0
    stall_ms: Duration = 0
    max_retries: Annotated[int, Field(strict=True, ge=0, le=MAX_RETRIES)] = DEFAULT_RETRIES
    batch: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{0,128}$")] = ""
    callback_url: OptionalUrl = ""
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _deadline_after_start(self) -> "JobTerms":
        if 0 < self.deadline_ms <= self.delay_ms:
            raise ValueError(
                f"deadline {self.deadline_ms} ms is not after the delay of {self.delay_ms} ms"
            )
        return self


class TokenChunk(WireModel):
    """One entry of the token log: tokens ``start`` to ``end`` of the output and their text.

    All of them belong to one ``choice``, the number of one of the job's outputs; ``start`` and
    ``end`` count the tokens of all choices in the order in which they were told.  ``text`` may lag
    behind ``ids`` while a stop string or a UTF-8 character is incomplete.
    ``logprobs`` has one entry per id if the job asked for them.
    """

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    ids: TokenIds = ()
    text: str = ""
    choice: int = Field(default=0, ge=0)
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Usage(WireModel):
    """Token counts of a finished job."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class ChoiceEnd(WireModel):
    """How one of several outputs ended; ``score`` is what it was chosen by, if it was."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None


class JobEnd(WireModel):
    """The terminal entry of a token log: how the job ended.

    ``choices`` has one entry per output of a job that asked for several, or for the best; the
    reasons are those of the first one.
    """

    state: Name
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    usage: Usage = Usage()
    choices: tuple[ChoiceEnd, ...] = ()


class ChoiceOutput(WireModel):
    """One output of a job."""

    ids: TokenIds = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None


class JobResult(WireModel):
    """What is stored for a finished job.

    ``entries`` holds (end, number of characters) of each token-log entry, so that a late reader
    gets the same chunks as a live one.  ``logprobs`` has one entry per id, ``prompt_logprobs`` one
    per prompt token, None for the first, and ``prompt_ids`` its tokens, if the job asked for it.
    ``outcome`` is what a job of another kind than *generate* was for.  ``ids``, ``text`` and
    ``logprobs`` are those of the first choice, ``others`` holds the choices behind it;
    ``entry_choices`` names the choice of each entry if there are any.
    """

    end: JobEnd
    ids: TokenIds = ()
    text: str = ""
    entries: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_ids: TokenIds = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    outcome: Outcome | None = None
    others: tuple[ChoiceOutput, ...] = ()
    entry_choices: tuple[int, ...] = ()


class CommandKind(StrEnum):
    """What the scheduler can ask of a worker."""

    RUN = "run"
    CANCEL = "cancel"
    DRAIN = "drain"
    HINT = "hint"


class WorkerInfo(WireModel):
    """What a worker registers: the model it serves and its capacity (tokens, sequences, blocks)."""

    worker_id: Name
    model: Name
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)
    num_blocks: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    wire_version: int = Field(ge=1)
    hostname: str = ""
    pid: int = 0


class AdapterCard(WireModel):
    """A LoRA adapter that jobs may name; ``digest`` is of its files, ``rank`` its largest."""

    name: ShortName
    digest: Name
    rank: int = Field(ge=1)


class ModelCard(WireModel):
    """What producers must know of a served model to make a valid job.

    ``max_logprobs`` is the most alternatives that a job may ask for, -1 for no limit, ``max_n`` the
    most outputs.  ``task`` is
    the kind of jobs it is for, ``embedding_size`` the length of its vectors, 0 if it makes none.
    ``blob_store`` tells which blob store its workers read stored audio from, "" if from none.
    ``sampling_defaults`` are for what a request leaves out, to be filled in by who submits it.
    ``reasoning_ids`` are the tokens that begin and end its reasoning, none if it has no such.
    """

    name: Name
    revision: str
    tokenizer_digest: str
    max_model_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)
    eos_token_ids: TokenIds = ()
    max_logprobs: int = Field(default=DEFAULT_MAX_LOGPROBS, ge=-1)
    max_n: int = Field(default=DEFAULT_MAX_N, ge=1)
    task: Literal["generate", "embed", "score", "transcribe"] = "generate"
    embedding_size: int = Field(default=0, ge=0)
    blob_store: str = Field(default="", max_length=64)
    adapters: tuple[AdapterCard, ...] = Field(default=(), max_length=MAX_ADAPTERS)
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    reasoning_ids: TokenIds = ()


class FinishedSequence(WireModel):
    """What a job that left a worker had cost there.

    ``prompt_tokens`` is the length of its prompt, 0 if it was never known, ``cached_tokens`` those
    of them that were cached.
    """

    job_id: Name
    prompt_tokens: Natural = 0
    cached_tokens: Natural = 0
    output_tokens: Natural = 0


class WorkerStatus(WireModel):
    """One entry of a worker's status stream, written once per engine step while it works.

    ``waiting_tokens`` are uncached prompt tokens accepted but not yet computed, ``urgent_tokens``
    those of them that belong to interactive jobs; ``last_command`` is the id of the last command
    entry that these numbers include.  ``finished`` are the jobs that
    left since the status before, ``step`` is the last step, ``step_cost`` what the worker has
    learned of its own steps, ``kv`` how well its KV cache is used.
    """

    last_command: str = "0-0"
    num_running: int = Field(default=0, ge=0)
    num_waiting: int = Field(default=0, ge=0)
    waiting_tokens: int = Field(default=0, ge=0)
    urgent_tokens: int = Field(default=0, ge=0)
    free_blocks: int = Field(default=0, ge=0)
    step_seconds: float = Field(default=0.0, ge=0.0)
    prompt_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    generated_tokens: int = Field(default=0, ge=0)
    num_preemptions: int = Field(default=0, ge=0)
    draining: bool = False
    finished: tuple[FinishedSequence, ...] = ()
    step: StepFeatures | None = None
    step_cost: StepCost | None = None
    kv: KvUse | None = None


def _check_whole_digests(digests: bytes) -> bytes:
    if len(digests) % ROUTING_HASH_BYTES:
        raise ValueError(f"{len(digests)} bytes are not whole routing hashes")
    return digests


#: Routing hashes of ``ROUTING_HASH_BYTES`` bytes each, one after the other.
Digests = Annotated[bytes, AfterValidator(_check_whole_digests)]


class KvEvents(WireModel):
    """What became findable in a worker's prefix cache, and what ceased to be: routing hashes.

    ``seq`` counts the worker's batches from 1, so that a reader sees when it missed one.  What
    both fields name was stored first and evicted afterwards.
    """

    seq: int = Field(ge=1)
    stored: Digests = b""
    evicted: Digests = b""


class KvSnapshot(WireModel):
    """All routing hashes in a worker's prefix cache after the batch of events ``seq``."""

    seq: int = Field(ge=0)
    digests: Digests = b""


def invalid_request(error: ValidationError) -> InvalidRequest:
    """Turn pydantic's complaint about a caller's values into our error, naming the field."""
    field, reason = complaint_of(error.errors(include_url=False))
    return InvalidRequest(f"{field or 'request'}: {reason}", field=field or "request")
