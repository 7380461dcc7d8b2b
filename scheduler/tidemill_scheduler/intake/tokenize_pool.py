"""Tokenises jobs that arrive as text, beside the loop, so that they can be ordered like others."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import redis.asyncio

from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.errors import (
    ConfigError,
    InvalidRequest,
    ProtocolError,
    TidemillError,
    UnknownModel,
)
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import GenerateRequest, ModelCard
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill.protocol.requests import Request, decode_request
from tidemill.service.job_inputs import needs_tokenizer, prepare_job
from tidemill.service.prompt import PreparedPrompt, hint_key
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers
from tidemill_scheduler import metrics
from tidemill_scheduler.fleet.attention import Attention
from tidemill_scheduler.fleet.cards import load_cards
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.upkeep.refusal import refuse

if TYPE_CHECKING:  # needs the tokenizer extra; without it jobs are placed without a key
    from tidemill.service.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_BATCH = 32
_THREADS = 2
#: How often jobs look again for a model that no worker had registered.
_PARK_SECONDS = 1.0
#: A rough length for the credit of a prompt that cannot be tokenised here.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _TextJob:
    pointer: WaitingJob
    deadline: float


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the job's hash holds of it; ``request`` is empty if the job has ended."""

    request: bytes
    salt: bytes
    ref: JobRef


class TokenizePool:
    """Gives text jobs their routing key and cost, and hands them to ``place``.

    A job that its model cannot run ends as failed.  One whose tokenizer cannot be used here is
    placed without a key: its worker tokenises anyway.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        tokenizers: AsyncRedisTokenizers,
        place: Callable[[WaitingJob], None],
        *,
        epoch: int,
        unknown_model_seconds: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._tokenizers = tokenizers
        self._place = place
        self._epoch = epoch
        self._patience = unknown_model_seconds
        self._attention = Attention(max(unknown_model_seconds / 4, 3 * _PARK_SECONDS))
        self._jobs: deque[_TextJob] = deque()
        self._parked: list[_TextJob] = []
        self._batch_size = 0
        self._arrived = asyncio.Event()

    @property
    def num_parked(self) -> int:
        """Jobs whose model no worker has registered yet."""
        return len(self._parked)

    @property
    def num_waiting(self) -> int:
        """Jobs taken in and not placed, parked ones included."""
        return len(self._jobs) + self._batch_size + len(self._parked)

    def put(self, job: WaitingJob) -> None:
        """Take a job in; it is placed later."""
        self._jobs.append(_TextJob(job, time.monotonic() + self._patience))
        self._arrived.set()
        self._count()

    async def run(self) -> None:
        """Work for ever."""
        with ThreadPoolExecutor(_THREADS, "tokenize") as threads:
            while True:
                await self._wait()
                batch = [self._jobs.popleft() for _ in range(min(_BATCH, len(self._jobs)))]
                self._batch_size = len(batch)
                await self._process(threads, batch)
                self._batch_size = 0
                self._count()

    async def _wait(self) -> None:
        if self._jobs:
            return
        self._arrived.clear()
        try:
            async with asyncio.timeout(_PARK_SECONDS if self._parked else None):
                await self._arrived.wait()
        except TimeoutError:
            self._jobs.extend(self._parked)
            self._parked.clear()

    async def _process(self, threads: ThreadPoolExecutor, batch: Sequence[_TextJob]) -> None:
        stored = await self._load([job.pointer for job in batch])
        models = {job.pointer.model for job in batch}
        now = time.monotonic()
        # A worker that registered during a pause of ours had no chance to show its model before.
        was_watched = self._attention.look(now) >= self._patience
        cards = await load_cards(self._client, self._keys, models)
        await asyncio.gather(
            *(
                self._settle(
                    threads,
                    job,
                    data,
                    cards.get(job.pointer.model),
                    is_late=was_watched and job.deadline <= now,
                )
                for job, data in zip(batch, stored, strict=True)
            )
        )

    async def _load(self, batch: Sequence[WaitingJob]) -> list[_Stored]:
        async with self._client.pipeline(transaction=False) as pipe:
            for job in batch:
                pipe.hmget(self._keys.job(job.job_id), "req", "salt", *REF_FIELDS)
            rows = cast(list[list[bytes | None]], await pipe.execute())
        return [
            _Stored(request or b"", salt or b"", JobRef.read(job.job_id, reference))
            for job, (request, salt, *reference) in zip(batch, rows, strict=True)
        ]

    async def _settle(
        self,
        threads: ThreadPoolExecutor,
        job: _TextJob,
        stored: _Stored,
        card: ModelCard | None,
        *,
        is_late: bool,
    ) -> None:
        if not stored.request:
            # Ended meanwhile; its dispatch will be refused and removes the pointer.
            self._place(replace(job.pointer, cost=1))
        elif card is None and not is_late:
            self._parked.append(job)
        else:
            await self._tokenize(threads, job.pointer, stored, card)

    async def _tokenize(
        self,
        threads: ThreadPoolExecutor,
        job: WaitingJob,
        stored: _Stored,
        card: ModelCard | None,
    ) -> None:
        try:
            request = decode_request(stored.request)
            prompt = await self._prepare(threads, request, card, stored.salt)
        except (InvalidRequest, ProtocolError) as error:
            await self._fail(job, stored, error)
        except ConfigError as error:
            _log.warning("%s is placed without a key: %s", job.job_id, error.one_line())
            guess = replace(job, is_estimated=True)
            self._done("skipped", guess, _unread_prompt(request, card, stored))
        else:
            known = replace(job, max_tokens=prompt.max_output)
            self._done("tokenized", known, prompt)

    async def _prepare(
        self,
        threads: ThreadPoolExecutor,
        request: Request,
        card: ModelCard | None,
        salt: bytes,
    ) -> PreparedPrompt:
        if card is None:
            raise UnknownModel(
                f"model: no worker serves {request.model!r}",
                field="model",
                fix="Start a worker that serves it, or correct the name.",
            )
        tokenizer: Tokenizer | None = None
        if needs_tokenizer(request):
            tokenizer = await self._tokenizers.get(self._client, card)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, _prepare, request, tokenizer, card, salt)

    def _done(self, outcome: str, job: WaitingJob, prompt: PreparedPrompt) -> None:
        metrics.TOKENIZED.labels(outcome).inc()
        key, cost = prompt.routing_key, max(1, prompt.cost)
        self._place(replace(job, key=key, cost=cost, hint_depth=prompt.hint_depth))

    async def _fail(self, job: WaitingJob, stored: _Stored, error: TidemillError) -> None:
        metrics.TOKENIZED.labels("refused").inc()
        _log.info("%s cannot run: %s", job.job_id, type(error).__name__)
        await run_async(self._client, refuse(self._keys, stored.ref, error, epoch=self._epoch))

    def _count(self) -> None:
        metrics.UNTOKENIZED_JOBS.set(self.num_waiting)


def _unread_prompt(request: Request, card: ModelCard | None, stored: _Stored) -> PreparedPrompt:
    cost = len(stored.request) // _BYTES_PER_TOKEN
    hint = b""
    if card is not None and isinstance(request, GenerateRequest):
        hint = hint_key(request, card, stored.salt)
    return PreparedPrompt((), hint, cost, hint_depth=len(hint) // ROUTING_HASH_BYTES)


def _prepare(
    request: Request, tokenizer: "Tokenizer | None", card: ModelCard, salt: bytes
) -> PreparedPrompt:
    try:
        return prepare_job(request, tokenizer, card, salt).prompt
    except TidemillError:
        raise
    except Exception as error:
        # Whatever one prompt does to the tokenizer must end that job, not this daemon.
        _log.exception("the tokenizer failed")
        raise InvalidRequest(
            f"prompt: the tokenizer failed with {type(error).__name__}", field="prompt"
        ) from error
