"""Every error Tidemill raises on purpose.

TidemillError
├── ConfigError                  a setting or command-line value is wrong
├── InvalidRequest               a job was refused; nothing was queued
│   ├── UnknownModel             no worker serves this model
│   ├── IdempotencyConflict      same idempotency key, different body
│   ├── BatchClosed              the batch takes no more jobs
│   ├── ContextExceeded          prompt and answer do not fit into the model's context
│   ├── RequestTooLarge          its body is longer than the gateway takes
│   └── CannotGoOn               an answer has come to where nothing can follow
│       ├── NoTokenLeft          what it allows and forbids leaves no token to choose
│       └── GrammarTooComplex    its grammar costs more than a step may
├── AccessDenied                 the caller may not do this
│   ├── Unauthenticated          no API key, or one that is not known
│   └── Forbidden                the key is known and does not allow it
├── Overloaded                   try again after ``retry_after_seconds``
│   ├── QueueFull                a bound on waiting jobs, tokens or bytes is reached
│   └── RateLimited              the tenant's requests or tokens per minute are used up
├── ProtocolError                bytes on the wire are not what the contract says
│   ├── MalformedMessage
│   └── UnsupportedVersion
├── BrokerError                  Redis or Valkey
│   ├── BrokerUnavailable        not reachable within the timeout
│   │   └── BrokerRefused        a server of ours ended by itself at start
│   ├── BrokerNotFound           no server to start
│   ├── BrokerUnsupported        server too old or configured to lose data
│   ├── DataDirectoryInUse       another server holds the data directory
│   └── PortInUse
├── JobError                     about one job, carries ``job_id``
│   ├── JobNotFound
│   │   └── ResultExpired        it was accepted and has ended, and is forgotten
│   ├── JobNotFinished           no terminal state within the caller's timeout
│   ├── JobCancelled
│   ├── JobFailed                ended as failed, expired or dead
│   └── StreamGap                the token log contradicts itself
├── NoSuchObject                 no file or batch of this id, or it has expired
├── WrongState                   what was asked for does not go with the state of a batch
├── BlobError                    the store of files and large values refused something
│   ├── BlobNotFound
│   └── BlobUnavailable          it does not answer
├── FencingError                 this process lost the right to write
│   ├── StaleEpoch               a newer scheduler leads
│   └── StaleFence               a newer attempt owns the job
├── EngineFailed                 a worker's engine computes nothing any more
├── SimulationFailed             a simulated policy loses jobs, or counts do not add up
└── ModelError                   a model directory cannot be served
    ├── ModelNotFound
    ├── DamagedModel             files missing, truncated or inconsistent
    ├── UnsafeModel              pickle weights or remote code
    └── UnsupportedModel         an architecture or feature we do not run
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self


class PartialResult(Protocol):
    """What a job had produced when it ended without success."""

    @property
    def text(self) -> str:
        """The text so far."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""


class TidemillError(Exception):
    """Root of the tree; ``fix`` says in one sentence what to do about it."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def one_line(self) -> str:
        """Cause and fix on a single line, as the command line prints it."""
        text = f"{self.message.rstrip('.')}. {self.fix}" if self.fix else self.message
        return " ".join(text.split())


class ConfigError(TidemillError):
    """A setting or command-line value is wrong."""


class InvalidRequest(TidemillError):
    """A job was refused before it was queued; ``field`` names the culprit."""

    def __init__(self, message: str, *, field: str, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.field = field


class UnknownModel(InvalidRequest):
    """No worker has served this model recently."""


class UnknownAdapter(InvalidRequest):
    """No worker of the model has an adapter of this name; ``names`` are those there are."""

    def __init__(self, name: str, names: Sequence[str] = ()) -> None:
        known = f"Known adapters: {', '.join(names)}." if names else "The model has none."
        super().__init__(f"lora: there is no adapter {name[:128]!r}", field="lora", fix=known)


class IdempotencyConflict(InvalidRequest):
    """The idempotency key was used before with another body, for the job ``job_id``."""

    def __init__(self, message: str, *, field: str, fix: str = "", job_id: str = "") -> None:
        super().__init__(message, field=field, fix=fix)
        self.job_id = job_id


class BatchClosed(InvalidRequest):
    """The batch was cancelled and takes no more jobs."""


class ContextExceeded(InvalidRequest):
    """Prompt and answer together are longer than the model's context."""


class RequestTooLarge(InvalidRequest):
    """The body of an HTTP request is longer than the gateway takes."""


class CannotGoOn(InvalidRequest, ABC):
    """The answers ``seq_ids`` cannot go on; the step never happened, and all others can."""

    seq_ids: tuple[str, ...]

    @abstractmethod
    def of(self, seq_ids: tuple[str, ...]) -> Self:
        """Return the same error of these answers."""


class NoTokenLeft(CannotGoOn):
    """What the sequences ``seq_ids`` allow and forbid leaves them no token to choose."""

    def __init__(self, seq_ids: tuple[str, ...]) -> None:
        super().__init__(
            f"params: what {', '.join(seq_ids)} allows and forbids leaves no token to choose",
            field="params",
            fix="Look at allowed_token_ids, bad_words, min_tokens and the structure asked for.",
        )
        self.seq_ids = seq_ids

    def of(self, seq_ids: tuple[str, ...]) -> Self:
        """Return the same error of these answers."""
        return type(self)(seq_ids)


class GrammarTooComplex(CannotGoOn):
    """The grammar of ``field`` costs more than a step may, behind what was answered so far."""

    def __init__(self, field: str, reason: str, seq_ids: tuple[str, ...] = ()) -> None:
        super().__init__(
            f"{field}: it became too complex within the answer: {reason}",
            field=field,
            fix="Make it simpler.",
        )
        self.reason = reason
        self.seq_ids = seq_ids

    def of(self, seq_ids: tuple[str, ...]) -> Self:
        """Return the same error of these answers."""
        return type(self)(self.field, self.reason, seq_ids)


class AccessDenied(TidemillError):
    """The caller of the HTTP interface may not do this."""


class Unauthenticated(AccessDenied):
    """There is no API key, or one that is not known."""


class Forbidden(AccessDenied):
    """The API key is known and does not allow this."""


class Overloaded(TidemillError):
    """The system is full; retry after ``retry_after_seconds``."""

    def __init__(self, message: str, *, retry_after_seconds: float, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.retry_after_seconds = retry_after_seconds


class QueueFull(Overloaded):
    """A bound on waiting jobs, their tokens or their bytes is reached, or the server's memory."""


class RateLimited(Overloaded):
    """The requests or tokens per minute of a tenant or of an API key are used up.

    ``unit`` is "requests" or "tokens".
    """

    def __init__(
        self, message: str, *, retry_after_seconds: float, fix: str = "", unit: str = "requests"
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds, fix=fix)
        self.unit = unit


class ProtocolError(TidemillError):
    """Bytes on the wire are not what the contract says."""


class MalformedMessage(ProtocolError):
    """The bytes do not decode to the expected message."""


class UnsupportedVersion(ProtocolError):
    """The message carries a protocol version this process cannot read."""


class BrokerError(TidemillError):
    """Something about the Redis or Valkey server."""


class BrokerUnavailable(BrokerError):
    """The server did not answer within the timeout."""


class BrokerRefused(BrokerUnavailable):
    """A server of ours ended by itself at start: it does not take its data or its settings."""


class BrokerNotFound(BrokerError):
    """There is no server to connect to and none to start."""


class BrokerUnsupported(BrokerError):
    """The server is too old, or configured in a way that loses jobs."""


class DataDirectoryInUse(BrokerError):
    """Another server holds the lock of the data directory."""


class PortInUse(BrokerError):
    """The TCP port is taken."""


class JobError(TidemillError):
    """About one job."""

    def __init__(self, message: str, *, job_id: str, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.job_id = job_id


class JobNotFound(JobError):
    """The job was never accepted here, or its result has expired."""


class ResultExpired(JobNotFound):
    """The job was accepted, and neither it nor its result is kept any more."""


class JobNotFinished(JobError):
    """The job reached no terminal state within the caller's timeout."""


class JobCancelled(JobError):
    """The job was cancelled; ``result`` is its partial output where it was asked for."""

    def __init__(
        self, message: str, *, job_id: str, fix: str = "", result: PartialResult | None = None
    ) -> None:
        super().__init__(message, job_id=job_id, fix=fix)
        self.result = result


class JobFailed(JobError):
    """The job ended as failed, expired or dead; ``state`` says which, ``result`` how far it got.

    ``finish_reason`` of an expired job is the time limit that passed: deadline, queue_timeout or
    stalled.
    """

    def __init__(
        self,
        message: str,
        *,
        job_id: str,
        state: str,
        finish_reason: str = "",
        fix: str = "",
        result: PartialResult | None = None,
    ) -> None:
        super().__init__(message, job_id=job_id, fix=fix)
        self.state = state
        self.finish_reason = finish_reason
        self.result = result


class StreamGap(JobError):
    """The token log of a job contradicts itself; never expected."""


class NoSuchObject(TidemillError):
    """The tenant has no file or batch ``object_id``, or it has expired."""

    def __init__(self, message: str, *, object_id: str, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.object_id = object_id


class WrongState(TidemillError):
    """What was asked for does not go with the state of a batch."""


class BlobError(TidemillError):
    """The store of files and large values refused something."""


class BlobNotFound(BlobError):
    """The store has no blob of this name."""


class BlobUnavailable(BlobError):
    """The store does not answer; it may do so later."""


class FencingError(TidemillError):
    """This process lost the right to write what it tried to write."""


class StaleEpoch(FencingError):
    """A newer scheduler leads the shard."""


class StaleFence(FencingError):
    """A newer attempt owns the job."""


class EngineFailed(TidemillError):
    """The engine of a worker fails on everything; a new process may do better."""


class SimulationFailed(TidemillError):
    """A simulated policy broke a rule, or what was counted does not add up."""


class ModelError(TidemillError):
    """A model directory cannot be served."""


class ModelNotFound(ModelError):
    """There is no such model directory or package."""


class DamagedModel(ModelError):
    """Files are missing, truncated or contradict each other."""


class UnsafeModel(ModelError):
    """Pickle weights or remote code, which Tidemill never loads."""


class UnsupportedModel(ModelError):
    """An architecture or feature that Tidemill does not run."""
