"""The asynchronous twin of ``tidemill.client``."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from tidemill._async_bulk import AsyncBulk, Items, deliver
from tidemill._async_job_lists import AsyncJobLists
from tidemill._async_jobs import AsyncJobs
from tidemill._async_link import AsyncLinks
from tidemill._async_shared import AsyncShared
from tidemill._async_submitter import AsyncSubmitter, Charge
from tidemill._best_of import candidates, first_error
from tidemill._checks import check_top_n
from tidemill._collection import Collection
from tidemill._endpoint import find_endpoint
from tidemill._items import KeyOf, PromptOf
from tidemill._large_audio import AudioShelf
from tidemill._map_run import HowToMap, MapOptions, MapRun, Progress
from tidemill._patience import DEFAULT_TIMEOUT_SECONDS
from tidemill._reads import JobStatus
from tidemill._receipt import Receipt, check_durability
from tidemill._request import (
    CandidateOptions,
    JobOptions,
    JobSpec,
    Prompt,
    RunOptions,
)
from tidemill._sweep import cancel_batch, cancel_tenant
from tidemill._terms import check_batch
from tidemill.async_best_of import AsyncBestOf
from tidemill.async_job import AsyncJob
from tidemill.async_job_batch import AsyncJobBatch
from tidemill.async_stream import AsyncTokenStream
from tidemill.async_watch import AsyncWatches
from tidemill.batch import CancelCounts
from tidemill.job_kinds import (
    Audio,
    EmbedOptions,
    EmbedSpec,
    Inputs,
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


T = TypeVar("T")


class AsyncProducer(AsyncJobLists):
    """Submits jobs for one tenant and follows them, on one subscribed connection a shard.

    One answer: ``generate``.  A job to follow, to end or to find again: ``submit``.  A dataset:
    ``map``.  Many jobs now, their results later: ``batch``.  Other kinds of models: ``embed``,
    ``score``, ``rerank``, ``transcribe``.

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
        self._shelf = AudioShelf(endpoint.url, tenant)
        self._links = AsyncLinks(endpoint, timeout) if _shared is None else _shared.links(endpoint)
        store = TokenizerStore(endpoint.cache_dir) if _shared is None else _shared.tokenizers
        self._submitter = AsyncSubmitter(self._links.home, endpoint, store, replicated=replicated)
        self._jobs = AsyncJobs(self._links, self._submitter)
        self._watches = AsyncWatches()
        self._maps: set[AsyncBulk] = set()

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
        return await self._submit_many([JobSpec.of(item, options) for item in items])

    async def _submit_many(
        self, specs: Sequence[JobSpec], charge: Charge | None = None
    ) -> list[AsyncJob | TidemillError]:
        receipts = await self._submitter.submit_many(specs, charge)
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
        return AsyncJob(job_id, _jobs=self._jobs, _watches=self._watches)

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

    def batch(
        self,
        name: str | None = None,
        *,
        size: int = 256,
        return_exceptions: bool = False,
        **options: Unpack[JobOptions],
    ) -> AsyncJobBatch:
        """Return a collector of jobs, or the handle of those with this ``name``::

            async with producer.batch("night", max_tokens=100) as batch:
                for row in rows:
                    await batch.submit(row["prompt"])
            print(batch.ids, await batch.results())

        Jobs are queued ``size`` at a time in one round trip, the rest at the end of the block.  If
        it fails nothing stays half done: see ``JobBatch``.  ``options`` are those of ``submit``,
        for each job; with ``return_exceptions`` a refused job is no failure.  Jobs of one ``name``,
        submitted anywhere, are counted by ``batch.status()`` and end with ``batch.cancel()``.
        """
        collection: Collection[AsyncJob] = Collection(self._tenant, name, size, options)
        return AsyncJobBatch(
            collection,
            self._submitter,
            self._links.home,
            (self._keys, self._tenant),
            self._handle,
            return_exceptions=return_exceptions,
        )

    @overload
    def map(
        self,
        items: Items[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[False] = ...,
        with_items: Literal[False] = ...,
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[Result, None]: ...

    @overload
    def map(
        self,
        items: Items[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[False] = ...,
        with_items: Literal[True],
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[tuple[T, Result], None]: ...

    @overload
    def map(
        self,
        items: Items[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[True],
        with_items: Literal[False] = ...,
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[Result | TidemillError, None]: ...

    @overload
    def map(
        self,
        items: Items[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[True],
        with_items: Literal[True],
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[tuple[T, Result | TidemillError], None]: ...

    def map(
        self,
        items: Items[T],
        *,
        prompt: PromptOf[T] | None = None,
        max_in_flight: int = 64,
        ordered: bool = True,
        return_exceptions: bool = False,
        with_items: bool = False,
        key: KeyOf[T] | None = None,
        key_prefix: str | None = None,
        progress: Progress = False,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncGenerator[Any, None]:
        """Run a job for each item and iterate over the results, as many as you like of them.

        Items are prompts, ``JobSpec``s or rows; a dataset is any iterable of them, asynchronous or
        not, read no faster than jobs end: of a generator of a billion items no more than 16 times
        ``max_in_flight`` are held.  ``prompt`` is a row's column (by default ``messages``,
        ``prompt`` or ``prompt_ids``, the first that is there) or a function of an item::

            async for row, result in producer.map(
                dataset,
                prompt=lambda row: f"Summarise: {row['text']}",
                max_tokens=100,
                key="id",
                key_prefix="summaries-1",
                with_items=True,
                progress=True,
            ):
                print(row["id"], result.text)

        Results come in the order of the items, or with ``ordered=False`` as jobs end; with
        ``with_items`` as pairs of item and result.  The first error is raised; with
        ``return_exceptions`` each error takes the place of its result instead.

        With ``key_prefix`` a run that is made again, also after a crash, computes nothing twice
        that is not yet forgotten (24 hours after a job's end): jobs are found by the prefix and
        ``key``, a column or a function of an item, else the item's number.  What failed is run
        again.  The same key with another prompt or other options is ``IdempotencyConflict``.

        ``progress`` is True for a bar on standard error, or a function that gets ``MapProgress``.
        A full queue is waited for; ``JobNotFinished`` is raised after ``timeout`` seconds in which
        nothing happened.  When the iteration ends early (an error, ``break``, Ctrl-C, ``close()``
        of the iterator or of the producer), jobs in flight are cancelled, but for those with an
        idempotency key: another run finds them.  After ``BrokerUnavailable`` they go on.

        ``options`` are those of ``submit``.
        """
        how: HowToMap = {
            "prompt": prompt,
            "max_in_flight": max_in_flight,
            "ordered": ordered,
            "key": key,
            "key_prefix": key_prefix,
            "progress": progress,
            "timeout": timeout,
        }
        run = MapRun(items, how, options)
        link, submitter = self._links.home, self._submitter
        bulk = AsyncBulk(link, self._keys, submitter, self._wait_for, items, run)
        return deliver(bulk, self._maps, return_exceptions=return_exceptions, with_items=with_items)

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """Run one job and return its result; ``options`` are those of ``submit``.

        Waits for ``timeout`` seconds at most, then gives the job up and raises ``JobNotFinished``,
        as the four calls below do; so does whatever else cuts the waiting short, such as Ctrl-C.  A
        job with an idempotency key goes on all the same: the same call finds it again.
        """
        spec: JobOptions = {"stream": False, **options}
        return await self._jobs.ask(JobSpec(prompt, **spec), timeout)

    async def embed(
        self,
        inputs: str | Sequence[int] | Inputs,
        *,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Return a vector for a text, for the token ids of one, or for each of a list of either.

        Waits for ``timeout`` seconds at most, as ``generate`` does.  For many lists at once give
        ``EmbedSpec(...)`` to ``map``.
        """
        return embeddings_of(await self._jobs.ask(EmbedSpec(inputs, **options), timeout))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return how well each document answers the query, by a cross-encoder or by embeddings."""
        return scores_of(await self._jobs.ask(ScoreSpec(query, documents, **options), timeout))

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

        One of more than 256 KiB, and 25 MiB at most, goes through the blob store.  To follow what
        is written, submit a ``TranscribeSpec`` and stream the job.
        """
        options.setdefault("live", False)
        card = await self.model(options.get("model"))
        outlives = options.get("idempotency_key") is not None
        async with self._shelf.holding(audio, card, outlives=outlives) as given:
            return transcription_of(await self._jobs.ask(TranscribeSpec(given, **options), timeout))

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
            _watches=self._watches,
            _receipt=receipt,
        )

    async def close(self) -> None:
        """End what ``map`` and ``watch`` do here, and close the connections; other jobs go on."""
        for bulk in list(self._maps):
            await bulk.close()
        await self._watches.close()
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
