"""Turns run commands into what the engine needs: reads the job, its token log and its prompt."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis

from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.codec import decode
from tidemill.protocol.errors import InvalidRequest, StreamGap, TidemillError, UnknownAdapter
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import GenerateRequest, ModelCard, TokenChunk
from tidemill.protocol.prefix import ExtraKeys
from tidemill.protocol.requests import Request, decode_request
from tidemill.protocol.sampling import MAX_SEED
from tidemill.protocol.states import JobState
from tidemill.protocol.values import MAX_COUNT
from tidemill.service.job_inputs import check_kind
from tidemill.service.prompt import extra_keys, tokenize, validate
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.kind_work import KindWork
from tidemill_gpuworker.sampling.bad_words import tokenize_bad_words
from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.commands import Command
from tidemill_gpuworker.shell.failures import Failure, failure_of
from tidemill_gpuworker.shell.jobs import Job
from tidemill_gpuworker.shell.outbox import MAX_JOBS_PER_CALL
from tidemill_gpuworker.shell.work_clock import WorkClock

if TYPE_CHECKING:
    # They load torch, which is slow and not needed by what decides which sequences run.
    from tidemill_gpuworker.lora.adapters import Adapters
    from tidemill_gpuworker.lora.layers import LoadedAdapter

_log = logging.getLogger(__name__)

_FIELDS = ("st", "f", "n", "salt", "req", *REF_FIELDS)


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt ready to run: its prompt, and the log entries of the attempts before it."""

    job: Job
    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    seed: int
    extra_keys: ExtraKeys
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    adapter: "LoadedAdapter | None" = None
    written: tuple[TokenChunk, ...] = ()
    #: What the model's context leaves for the output, and the tokens that end one.
    max_output_tokens: int = MAX_COUNT
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KindClaim:
    """An attempt of a job of another kind than *generate*; ``inputs`` are what its engine reads."""

    job: Job
    request: Request
    inputs: Any
    written: tuple[TokenChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An attempt that cannot run."""

    job: Job
    failure: Failure
    written: tuple[TokenChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class _StoredJob:
    state: str
    fence: int
    num_tokens: int
    salt: bytes
    request: bytes
    ref: JobRef

    def as_job(self, *, stream: bool = True) -> Job:
        return Job(self.ref, self.fence, stream)


class ClaimLoader:
    """Claims and reads jobs; a job's own faults end in a ``Refusal`` and harm no other job.

    The claim comes before anything is computed: only an attempt that was claimed counts as a
    crash when its worker dies.  ``clock`` counts the work on each prompt.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: ShardKeys,
        worker_id: str,
        card: ModelCard,
        tokenizer: Tokenizer,
        clock: WorkClock,
        *,
        kinds: KindWork | None = None,
        adapters: "Adapters | None" = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._card = card
        self._tokenizer = tokenizer
        self._clock = clock
        self._kinds = kinds
        self._adapters = adapters

    def load(self, commands: Sequence[Command]) -> list[Claim | KindClaim | Refusal | None]:
        """One result per run command: None if that attempt is over already.

        Raises what redis-py raises when the server is away; the same commands may be loaded again.
        """
        owned = self._claim_and_read(commands)
        resumed = [
            c.job_id for c, job in zip(commands, owned, strict=True) if job and job.num_tokens
        ]
        logs = dict(zip(resumed, self._read_logs(resumed), strict=True))
        return [
            self._claim(command.job_id, job, logs.get(command.job_id, [])) if job else None
            for command, job in zip(commands, owned, strict=True)
        ]

    def ref_of(self, job_id: str) -> JobRef:
        """What every write about a job needs to know of it."""
        # redis-py's type does not know that our connections answer in bytes.
        values: Any = self._client.hmget(self._keys.job(job_id), REF_FIELDS)
        return JobRef.read(job_id, values)

    def _claim_and_read(self, commands: Sequence[Command]) -> list[_StoredJob | None]:
        claims = [self._claims(batch) for batch in _batches(commands)]
        with self._client.pipeline(transaction=False) as pipe:
            for call in claims:
                pipe.execute_command(*call.command)  # type: ignore[no-untyped-call]
            for command in commands:
                pipe.hmget(self._keys.job(command.job_id), _FIELDS)
            replies = pipe.execute()
        claimed = _flatten(c.parse(r) for c, r in zip(claims, replies, strict=False))
        stored = (
            _stored_job(command.job_id, fields)
            for command, fields in zip(commands, replies[len(claims) :], strict=True)
        )
        return [
            job if is_ours and job and _is_attempt(job, command) else None
            for is_ours, job, command in zip(claimed, stored, commands, strict=True)
        ]

    def _claims(self, commands: Sequence[Command]) -> Call[list[bool]]:
        attempts = [(command.job_id, command.fence) for command in commands]
        return calls.claim(self._keys, worker_id=self._worker_id, jobs=attempts)

    def _read_logs(self, job_ids: Sequence[str]) -> list[list[bytes]]:
        with self._client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.xrange(self._keys.token_log(job_id))
            replies = pipe.execute()
        return [[fields[b"d"] for _, fields in log if b"d" in fields] for log in replies]

    def _claim(
        self, job_id: str, stored: _StoredJob, log: Sequence[bytes]
    ) -> Claim | KindClaim | Refusal:
        written: tuple[TokenChunk, ...] = ()
        job = stored.as_job()
        try:
            with self._clock.working():
                request = decode_request(stored.request)
                job = stored.as_job(stream=request.stream)
                written = _read_log(job_id, log, stored.num_tokens)
                return self._prepare(job, request, stored.salt, written)
        except Exception as error:
            # The outermost frame of one job: whatever its prompt breaks, its neighbours go on.
            if not isinstance(error, TidemillError):
                _log.exception("%s: the prompt cannot be prepared", job_id)
                metrics.CLAIM_ERRORS.inc()
            return Refusal(job, failure_of(error, "the prompt cannot be prepared"), written)

    def _prepare(
        self, job: Job, request: Request, salt: bytes, written: tuple[TokenChunk, ...]
    ) -> Claim | KindClaim:
        if request.model != self._card.name:
            raise InvalidRequest(
                f"model: {request.model!r} came to a worker of {self._card.name!r}", field="model"
            )
        check_kind(request.kind, self._card)
        if not isinstance(request, GenerateRequest):
            return self._prepare_kind(job, request, written)
        adapter = self._adapter(request.lora)
        prompt_ids = tokenize(request, self._tokenizer, self._card)
        validate(request, len(prompt_ids), self._card)
        return Claim(
            job=job,
            request=request,
            prompt_ids=prompt_ids,
            seed=seed_of(job.job_id, request),
            extra_keys=extra_keys(
                salt,
                self._card.revision,
                request.cache_salt,
                None if adapter is None else (adapter.name, adapter.digest),
            ),
            adapter=adapter,
            bad_word_ids=tokenize_bad_words(
                request.params.bad_words, self._tokenizer, self._card.vocab_size
            ),
            written=written,
            max_output_tokens=self._card.max_model_len - len(prompt_ids),
            eos_token_ids=self._card.eos_token_ids,
        )

    def _adapter(self, name: str | None) -> "LoadedAdapter | None":
        if name is None:
            return None
        if self._adapters is None:
            raise UnknownAdapter(name)
        return self._adapters.get(name)

    def _prepare_kind(
        self, job: Job, request: Request, written: tuple[TokenChunk, ...]
    ) -> KindClaim:
        assert self._kinds is not None, "a model of another task than generate has its kinds"
        return KindClaim(job, request, self._kinds.prepare(request), written)


def seed_of(job_id: str, request: GenerateRequest) -> int:
    """The seed of all attempts of a job: the request's, or one that the job id determines."""
    if request.params.seed is not None:
        return request.params.seed
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big") & MAX_SEED


def _batches(commands: Sequence[Command]) -> Iterable[Sequence[Command]]:
    for start in range(0, len(commands), MAX_JOBS_PER_CALL):
        yield commands[start : start + MAX_JOBS_PER_CALL]


def _flatten(lists: Iterable[list[bool]]) -> list[bool]:
    return [item for items in lists for item in items]


def _is_attempt(job: _StoredJob, command: Command) -> bool:
    # Between the claim and the read its owner may have cancelled it.
    return job.state == JobState.RUNNING and job.fence == command.fence


def _stored_job(job_id: str, fields: Sequence[bytes | None]) -> _StoredJob | None:
    state, fence, num_tokens, salt, request, *reference = fields
    if state is None:
        return None
    return _StoredJob(
        state=state.decode(),
        fence=int(fence or 0),
        num_tokens=int(num_tokens or 0),
        salt=salt or b"",
        request=request or b"",
        ref=JobRef.read(job_id, reference),
    )


def _read_log(job_id: str, log: Sequence[bytes], num_tokens: int) -> tuple[TokenChunk, ...]:
    chunks = tuple(decode(data, TokenChunk) for data in log)
    position = 0
    for chunk in chunks:
        if chunk.start != position or chunk.end != position + len(chunk.ids):
            break
        position = chunk.end
    if position != num_tokens or (chunks and chunks[-1].end != position):
        raise StreamGap(
            f"the token log of the job breaks off at token {position} of {num_tokens}",
            job_id=job_id,
            fix="Submit the job again.",
        )
    return chunks
