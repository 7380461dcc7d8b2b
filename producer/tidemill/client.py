"""The synchronous client: submit jobs, follow them, collect their results."""

from collections.abc import Generator, Iterable, Sequence
from inspect import GEN_RUNNING, getgeneratorstate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload
from weakref import WeakSet

from tidemill._best_of import candidates, first_error
from tidemill._bulk import Bulk, deliver
from tidemill._checks import check_top_n
from tidemill._collection import Collection
from tidemill._endpoint import find_endpoint
from tidemill._items import KeyOf, PromptOf
from tidemill._job_lists import JobLists
from tidemill._jobs import Jobs
from tidemill._large_audio import AudioShelf
from tidemill._link import Links
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
from tidemill._submitter import Submitter
from tidemill._sweep import cancel_batch, cancel_tenant
from tidemill._terms import check_batch
from tidemill.batch import CancelCounts
from tidemill.best_of import BestOf
from tidemill.job import Job
from tidemill.job_batch import JobBatch
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
from tidemill.status import Status, details, overview
from tidemill.watch import Watches

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer
from tidemill.stream import TokenStream

T = TypeVar("T")


class Producer(JobLists):
    """Submits jobs for one tenant and follows them; safe to share between threads.

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
    ) -> None:
        replicated = check_durability(durability)
        endpoint = find_endpoint(url, tenant, shard)
        self._keys, self._tenant = endpoint.keys, endpoint.tenant
        self._links = Links(endpoint, timeout)
        self._shelf = AudioShelf(endpoint.url, tenant)
        self._submitter = Submitter(self._links.home, endpoint, replicated=replicated)
        self._jobs = Jobs(self._links, self._submitter)
        self._watches = Watches(endpoint, timeout, replicated=replicated)
        self._maps: WeakSet[Generator[Any, None, None]] = WeakSet()

    def submit(
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
    ) -> Job:
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
        [job] = self.submit_many([JobSpec(prompt, **everything)])
        if isinstance(job, TidemillError):
            raise job
        return job

    def submit_many(
        self, items: Iterable[Prompt | JobSpec], **options: Unpack[JobOptions]
    ) -> list[Job | TidemillError]:
        """Queue jobs in one round trip; an error takes the place of a refused job.

        ``options`` are those of ``submit``; an item that is a ``JobSpec`` has its own besides.
        """
        receipts = self._submitter.submit_many([JobSpec.of(item, options) for item in items])
        return [self._handle(r) if isinstance(r, Receipt) else r for r in receipts]

    def submit_best_of(
        self, prompt: Prompt, *, n: int = 8, **options: Unpack[CandidateOptions]
    ) -> BestOf:
        """Queue ``n`` jobs of one prompt that differ in their seeds alone, in one round trip.

        They share the prompt's prefix, so it is computed once.  ``options`` are those of
        ``submit``; the seeds follow from ``seed``, else from the idempotency key, else by chance.
        A call with an idempotency key may be made again: it finds what was queued and adds what is
        missing, or more with a larger ``n``.  Without one all is cancelled if a candidate is
        refused.  Raises what ``submit`` raises.
        """
        specs = candidates(prompt, n, options)
        outcomes = self.submit_many(specs)
        error = first_error(outcomes)
        jobs = tuple(job for job in outcomes if isinstance(job, Job))
        if error is None:
            return BestOf(jobs)
        if not specs[0].has_key:
            BestOf(jobs).cancel()
        raise error

    def job(self, job_id: str) -> Job:
        """Return a handle of a job submitted earlier, here or elsewhere; asks nobody."""
        return Job(job_id, _jobs=self._jobs, _watches=self._watches)

    def stream(
        self, job_id: str, *, after: str | int = 0, timeout: float | None = None
    ) -> TokenStream:
        """Iterate over a job's output, from the start or ``after`` an event id or token count."""
        return self._jobs.stream(job_id, after, timeout)

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job's whole output.

        Raises ``JobFailed`` and ``JobCancelled``, which carry the partial result, ``JobNotFound``,
        ``JobNotFinished`` after ``timeout`` seconds, or ``ProtocolError`` if what was stored cannot
        be read.
        """
        return self._jobs.result(job_id, timeout)

    def cancel(self, job_id: str) -> JobState:
        """End a job now and return its final state: another one if it had ended before.

        What it produced so far is kept.  Raises ``JobNotFound``.
        """
        return self._jobs.cancel(job_id)

    def batch(
        self,
        name: str | None = None,
        *,
        size: int = 256,
        return_exceptions: bool = False,
        **options: Unpack[JobOptions],
    ) -> JobBatch:
        """Return a collector of jobs, or the handle of those with this ``name``::

            with producer.batch("night", max_tokens=100) as batch:
                for row in rows:
                    batch.submit(row["prompt"])
            print(batch.ids, batch.results())

        Jobs are queued ``size`` at a time in one round trip, the rest at the end of the block.  If
        it fails nothing stays half done: see ``JobBatch``.  ``options`` are those of ``submit``,
        for each job; with ``return_exceptions`` a refused job is no failure.  Jobs of one ``name``,
        submitted anywhere, are counted by ``batch.status()`` and end with ``batch.cancel()``.
        """
        collection: Collection[Job] = Collection(self._tenant, name, size, options)
        return JobBatch(
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
        items: Iterable[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[False] = ...,
        with_items: Literal[False] = ...,
        **options: Unpack[MapOptions],
    ) -> Generator[Result, None, None]: ...

    @overload
    def map(
        self,
        items: Iterable[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[False] = ...,
        with_items: Literal[True],
        **options: Unpack[MapOptions],
    ) -> Generator[tuple[T, Result], None, None]: ...

    @overload
    def map(
        self,
        items: Iterable[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[True],
        with_items: Literal[False] = ...,
        **options: Unpack[MapOptions],
    ) -> Generator[Result | TidemillError, None, None]: ...

    @overload
    def map(
        self,
        items: Iterable[T],
        *,
        prompt: PromptOf[T] | None = ...,
        return_exceptions: Literal[True],
        with_items: Literal[True],
        **options: Unpack[MapOptions],
    ) -> Generator[tuple[T, Result | TidemillError], None, None]: ...

    def map(
        self,
        items: Iterable[T],
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
    ) -> Generator[Any, None, None]:
        """Run a job for each item and iterate over the results, as many as you like of them.

        Items are prompts, ``JobSpec``s or rows; a dataset is any iterable of them, read no faster
        than jobs end: of a generator of a billion items no more than 16 times ``max_in_flight`` are
        held.  ``prompt`` is a row's column (by default ``messages``, ``prompt`` or ``prompt_ids``,
        the first that is there) or a function of an item::

            for row, result in producer.map(
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
        bulk = Bulk(self._links.home, self._keys, self._submitter, items, run)
        outcomes = deliver(bulk, return_exceptions=return_exceptions, with_items=with_items)
        self._maps.add(outcomes)
        return outcomes

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """Run one job and return its result; ``options`` are those of ``submit``.

        Waits for ``timeout`` seconds at most, then gives the job up and raises ``JobNotFinished``,
        as the four calls below do; so does whatever else cuts the waiting short, such as Ctrl-C.  A
        job with an idempotency key goes on all the same: the same call finds it again.
        """
        spec: JobOptions = {"stream": False, **options}
        return self._jobs.ask(JobSpec(prompt, **spec), timeout)

    def embed(
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
        return embeddings_of(self._jobs.ask(EmbedSpec(inputs, **options), timeout))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return how well each document answers the query, by a cross-encoder or by embeddings."""
        return scores_of(self._jobs.ask(ScoreSpec(query, documents, **options), timeout))

    def rerank(
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
        scores = self.score(query, documents, timeout=timeout, **options)
        return ranked(documents, scores, top_n)

    def transcribe(
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
        card = self.model(options.get("model"))
        outlives = options.get("idempotency_key") is not None
        with self._shelf.holding_blocking(audio, card, outlives=outlives) as given:
            return transcription_of(self._jobs.ask(TranscribeSpec(given, **options), timeout))

    def cancel_batch(self, name: str) -> CancelCounts:
        """End all jobs of a batch now, and let no more into it; their partial output is kept.

        Jobs submitted to it from now on raise ``BatchClosed``.
        """
        plan = cancel_batch(self._keys, self._tenant, check_batch(name))
        self._submitter.fates.cancel_all(batch=name)
        return self._links.home.carry_out(plan)

    def cancel_tenant(self) -> CancelCounts:
        """End all jobs now that the tenant has submitted before; their partial output is kept."""
        self._submitter.fates.cancel_all()
        return self._links.home.carry_out(cancel_tenant(self._keys, self._tenant))

    def job_status(self, job_id: str) -> JobStatus:
        """Look at a job once; raises ``JobNotFound``."""
        return self._jobs.status(job_id)

    def model(self, name: str | None = None) -> ModelCard:
        """Return the card of a served model, of the only one by default."""
        return self._submitter.card(name)

    def models(self) -> tuple[ModelCard, ...]:
        """Return the cards of all models that are or lately were served, by name."""
        return self._submitter.cards()

    def tokenizer(self, model: str | None = None) -> "Tokenizer":
        """Return the tokenizer of a served model, of the only one by default.

        Raises ``UnknownModel``, or ``ConfigError`` without the extra ``tokenizer``.
        """
        return self._submitter.tokenizer(self._submitter.card(model))

    def status(self) -> Status:
        """Look at the shard: queues, workers, models."""
        link = self._links.home
        return link.read(details(self._keys, link.read(overview(self._keys))))

    def _handle(self, receipt: Receipt) -> Job:
        return Job(
            receipt.job_id,
            receipt.created,
            receipt.durability,
            _jobs=self._jobs,
            _watches=self._watches,
            _receipt=receipt,
        )

    def close(self) -> None:
        """End what ``map`` and ``watch`` do here, and close the connections; other jobs go on."""
        for outcomes in list(self._maps):
            if getgeneratorstate(outcomes) != GEN_RUNNING:
                outcomes.close()
        self._watches.close()
        self._links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
