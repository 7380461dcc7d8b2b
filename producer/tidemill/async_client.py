"""The asynchronous twin of ``tidemill.client``."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack, overload

from tidemill._async_bulk import AsyncBulk, Items
from tidemill._async_jobs import AsyncJobs
from tidemill._async_link import AsyncLinks
from tidemill._async_shared import AsyncShared
from tidemill._async_submitter import AsyncSubmitter
from tidemill._best_of import candidates, first_error
from tidemill._checks import check_top_n
from tidemill._endpoint import find_endpoint
from tidemill._patience import DEFAULT_TIMEOUT_SECONDS
from tidemill._reads import JobStatus
from tidemill._receipt import Receipt, check_durability
from tidemill._request import (
    CandidateOptions,
    JobOptions,
    JobSpec,
    Prompt,
    RunOptions,
    one_key_for_many,
)
from tidemill._sweep import cancel_batch, cancel_tenant
from tidemill._terms import check_batch
from tidemill._window import Window
from tidemill.async_best_of import AsyncBestOf
from tidemill.async_job import AsyncJob
from tidemill.async_stream import AsyncTokenStream
from tidemill.batch import BatchStatus, CancelCounts, batch_status
from tidemill.job_kinds import (
    Audio,
    EmbedOptions,
    EmbedSpec,
    Inputs,
    KindSpec,
    ScoreOptions,
    ScoreSpec,
    TranscribeOptions,
    TranscribeSpec,
)
from tidemill.outcomes import (
    Embeddings,
    Ranked,
    Scores,
    Transcription,
    embeddings_of,
    ranked,
    scores_of,
    transcription_of,
)
from tidemill.protocol.errors import (
    BrokerError,
    JobCancelled,
    JobFailed,
    JobNotFound,
    TidemillError,
)
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import JobState
from tidemill.result import Result
from tidemill.service.tokenizer_cache import TokenizerStore
from tidemill.status import Status, details, overview

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer


class AsyncProducer:
    """Submits jobs for one tenant and follows them, on one subscribed connection a shard.

    ``url`` defaults to ``TIDEMILL_REDIS_URL``, then to the embedded server's address.  Every call
    raises ``BrokerUnavailable`` if the broker stays away for ``timeout`` seconds.  With
    ``durability="replica"`` submitting waits up to half a second for a replica to have the jobs;
    ``Job.durability`` tells whether one does.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        tenant: str = "default",
        shard: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        durability: Literal["replica"] | None = None,
        _shared: AsyncShared | None = None,
    ) -> None:
        replicated = check_durability(durability)
        endpoint = find_endpoint(url, tenant, shard)
        self._keys, self._tenant = endpoint.keys, endpoint.tenant
        self._owns_links = _shared is None
        self._links = AsyncLinks(endpoint, timeout) if _shared is None else _shared.links(endpoint)
        store = TokenizerStore(endpoint.cache_dir) if _shared is None else _shared.tokenizers
        self._submitter = AsyncSubmitter(self._links.home, endpoint, store, replicated=replicated)
        self._jobs = AsyncJobs(self._links, self._submitter)

    async def submit(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        params: SamplingParams | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        cache_salt: str | None = None,
        prefix_id: str | None = None,
        lora: str | None = None,
        stream: bool = True,
        **options: Unpack[RunOptions],
    ) -> AsyncJob:
        """Queue one job; its prompt is text, token ids or the messages of a conversation.

        ``model`` may be left out while only one is served.  ``options`` are the fields of
        ``SamplingParams``, such as ``max_tokens``, which go before ``params``, and those of
        ``TermOptions``, such as ``deadline``.  A lower ``priority`` runs sooner.  The same
        ``idempotency_key`` always gets the same job, so a call that raised ``BrokerUnavailable``
        may be made again; it covers all options.  ``prefix_id`` names what the prompt begins with,
        so that jobs of one name run together also where a short prefix or a text does not show it.
        ``lora`` names an adapter of the model, whose name may be given as ``model`` as well.
        ``stream=False`` saves the broker work if only the result is wanted.

        Raises ``InvalidRequest`` (``UnknownModel``, ``IdempotencyConflict``, ``BatchClosed``) or
        ``Overloaded`` (``QueueFull``, ``RateLimited``), which says when to try again.
        """
        everything: JobOptions = {
            "model": model,
            "params": params,
            "priority": priority,
            "idempotency_key": idempotency_key,
            "cache_salt": cache_salt,
            "prefix_id": prefix_id,
            "lora": lora,
            "stream": stream,
            **options,
        }
        [job] = await self.submit_many([JobSpec(prompt, **everything)])
        if isinstance(job, TidemillError):
            raise job
        return job

    async def submit_many(
        self, items: Iterable[Prompt | JobSpec], **options: Unpack[JobOptions]
    ) -> list[AsyncJob | TidemillError]:
        """Queue jobs in one round trip; an error takes the place of a refused job.

        ``options`` are those of ``submit``; an item that is a ``JobSpec`` has its own besides.
        """
        receipts = await self._submitter.submit_many([JobSpec.of(item, options) for item in items])
        return [self._handle(r) if isinstance(r, Receipt) else r for r in receipts]

    async def submit_best_of(
        self, prompt: Prompt, *, n: int = 8, **options: Unpack[CandidateOptions]
    ) -> AsyncBestOf:
        """Queue ``n`` jobs of one prompt that differ in their seeds alone, in one round trip.

        They share the prompt's prefix, so it is computed once.  ``options`` are those of
        ``submit``; the seeds follow from ``seed``, else from the idempotency key, else by chance.
        A call with an idempotency key may be made again: it finds what was queued and adds what is
        missing, or more with a larger ``n``.  Without one all is cancelled if a candidate is
        refused.  Raises what ``submit`` raises.
        """
        specs = candidates(prompt, n, options)
        outcomes = await self.submit_many(specs)
        error = first_error(outcomes)
        jobs = tuple(job for job in outcomes if isinstance(job, AsyncJob))
        if error is None:
            return AsyncBestOf(jobs)
        if not specs[0].has_key:
            await AsyncBestOf(jobs).cancel()
        raise error

    def job(self, job_id: str) -> AsyncJob:
        """Return a handle of a job submitted earlier, here or elsewhere; asks nobody."""
        return AsyncJob(job_id, _jobs=self._jobs)

    def stream(
        self, job_id: str, *, after: str | int = 0, timeout: float | None = None
    ) -> AsyncTokenStream:
        """Iterate over a job's output, from the start or ``after`` an event id or token count."""
        return self._jobs.stream(job_id, after, timeout)

    async def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job's whole output.

        Raises ``JobFailed`` and ``JobCancelled``, which carry the partial result, ``JobNotFound``,
        ``JobNotFinished`` after ``timeout`` seconds, or ``ProtocolError`` if what was stored cannot
        be read.
        """
        return await self._jobs.result(job_id, timeout)

    async def cancel(self, job_id: str) -> JobState:
        """End a job now and return its final state: another one if it had ended before.

        What it produced so far is kept.  Raises ``JobNotFound``.
        """
        return await self._jobs.cancel(job_id)

    @overload
    def map(
        self,
        items: Items,
        *,
        max_in_flight: int = ...,
        ordered: bool = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[Result]: ...

    @overload
    def map(
        self,
        items: Items,
        *,
        max_in_flight: int = ...,
        ordered: bool = ...,
        return_exceptions: bool,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[Result | TidemillError]: ...

    def map(
        self,
        items: Items,
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        return_exceptions: bool = False,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[Result | TidemillError]:
        """Run a job for each item and iterate over the results, in the items' order or as they end.

        At most ``max_in_flight`` jobs are unfinished at once, and ``items`` is read no faster than
        that; a full queue is waited for.  The first error is raised; with ``return_exceptions``
        each error takes the place of its result instead.  When the iteration ends early, jobs still
        in flight are cancelled, but for those with an idempotency key: another run finds them.
        """
        if options.get("idempotency_key") is not None:
            raise one_key_for_many()
        window: Window[Result | TidemillError] = Window(max_in_flight, ordered=ordered)
        common: JobOptions = {"stream": False, **options}
        bulk = AsyncBulk(self._submitter, self._wait_for, items, common, window)
        return self._run(bulk, return_exceptions)

    async def _run(
        self, bulk: AsyncBulk, return_exceptions: bool
    ) -> AsyncIterator[Result | TidemillError]:
        try:
            async with aclosing(bulk.run()) as outcomes:
                async for outcome in outcomes:
                    if isinstance(outcome, TidemillError) and not return_exceptions:
                        raise outcome
                    yield outcome
        except BrokerError:
            raise
        except BaseException:
            for job_id in bulk.abandoned:
                with suppress(JobNotFound):
                    await self.cancel(job_id)
            raise

    async def embed(
        self,
        inputs: str | Sequence[int] | Inputs,
        *,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Return a vector for a text, for the token ids of one, or for each of a list of either.

        Waits for ``timeout`` seconds at most, then gives the job up and raises ``JobNotFinished``,
        as the three calls below do.  For many lists at once give ``EmbedSpec(...)`` to ``map``.
        """
        return embeddings_of(await self._ask(EmbedSpec(inputs, **options), timeout))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return how well each document answers the query, by a cross-encoder or by embeddings."""
        return scores_of(await self._ask(ScoreSpec(query, documents, **options), timeout))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[Ranked]:
        """Return the documents, the best first, or the best ``top_n`` of them, 1 or more."""
        check_top_n(top_n)
        scores = await self.score(query, documents, timeout=timeout, **options)
        return ranked(documents, scores, top_n)

    async def transcribe(
        self,
        audio: Audio,
        *,
        timeout: float | None = None,
        **options: Unpack[TranscribeOptions],
    ) -> Transcription:
        """Return what is said in a file of audio, given as its content or its path.

        To follow it as it is written, submit a ``TranscribeSpec`` and stream the job.
        """
        options.setdefault("live", False)
        return transcription_of(await self._ask(TranscribeSpec(audio, **options), timeout))

    async def _ask(self, spec: KindSpec, timeout: float | None) -> Result:
        [job] = await self.submit_many([spec])
        if isinstance(job, TidemillError):
            raise job
        try:
            return await job.result(timeout)
        except (JobCancelled, JobFailed, BrokerError):
            raise
        except BaseException:
            if not spec.has_key:
                with suppress(JobNotFound):
                    await job.cancel()
            raise

    async def cancel_batch(self, name: str) -> CancelCounts:
        """End all jobs of a batch now, and let no more into it; their partial output is kept.

        Jobs submitted to it from now on raise ``BatchClosed``.
        """
        plan = cancel_batch(self._keys, self._tenant, check_batch(name))
        self._submitter.fates.cancel_all(batch=name)
        return await self._links.home.carry_out(plan)

    async def cancel_tenant(self) -> CancelCounts:
        """End all jobs now that the tenant has submitted before; their partial output is kept."""
        self._submitter.fates.cancel_all()
        return await self._links.home.carry_out(cancel_tenant(self._keys, self._tenant))

    async def batch(self, name: str) -> BatchStatus:
        """Look at a batch of the tenant once."""
        read = batch_status(self._keys, self._tenant, check_batch(name))
        return await self._links.home.read(read)

    async def job_status(self, job_id: str) -> JobStatus:
        """Look at a job once; raises ``JobNotFound``."""
        return await self._jobs.status(job_id)

    async def model(self, name: str | None = None) -> ModelCard:
        """Return the card of a served model, of the only one by default."""
        return await self._submitter.card(name)

    async def models(self) -> tuple[ModelCard, ...]:
        """Return the cards of all models that are or lately were served, by name."""
        return await self._submitter.cards()

    async def tokenizer(self, model: str | None = None) -> "Tokenizer":
        """Return the tokenizer of a served model, of the only one by default.

        Raises ``UnknownModel``, or ``ConfigError`` without the extra ``tokenizer``.
        """
        return await self._submitter.tokenizer(await self._submitter.card(model))

    async def status(self) -> Status:
        """Look at the shard: queues, workers, models."""
        link = self._links.home
        return await link.read(details(self._keys, await link.read(overview(self._keys))))

    async def _wait_for(self, receipt: Receipt) -> Result:
        return await self._jobs.result(receipt.job_id, None, receipt)

    def _handle(self, receipt: Receipt) -> AsyncJob:
        return AsyncJob(
            receipt.job_id,
            receipt.created,
            receipt.durability,
            _jobs=self._jobs,
            _receipt=receipt,
        )

    async def close(self) -> None:
        """Close the connections; jobs go on."""
        if self._owns_links:
            await self._links.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
