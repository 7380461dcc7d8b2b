"""The asynchronous twin of ``tidemill._producer.submissions``."""

from collections.abc import Iterable, Sequence
from typing import Unpack

from tidemill._async_jobs import AsyncJobs
from tidemill._async_link import AsyncLinks
from tidemill._async_submitter import AsyncSubmitter, Charge
from tidemill._best_of import candidates, first_error
from tidemill._collection import Collection
from tidemill._receipt import Receipt
from tidemill._request import CandidateOptions, JobOptions, JobSpec, Prompt, RunOptions
from tidemill.async_best_of import AsyncBestOf
from tidemill.async_job import AsyncJob
from tidemill.async_job_batch import AsyncJobBatch
from tidemill.async_watch import AsyncWatches
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.sampling import SamplingParams


class AsyncSubmissions:
    """The calls of an ``AsyncProducer`` that queue jobs; see ``Submissions``."""

    _keys: ShardKeys
    _tenant: str
    _links: AsyncLinks
    _submitter: AsyncSubmitter
    _jobs: AsyncJobs
    _watches: AsyncWatches

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
        """Queue jobs, 64 in one round trip; an error takes the place of a refused job.

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

        Jobs are queued ``size`` at a time, the rest at the end of the block.  If
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

    def _handle(self, receipt: Receipt) -> AsyncJob:
        return AsyncJob(
            receipt.job_id,
            receipt.created,
            receipt.durability,
            _jobs=self._jobs,
            _watches=self._watches,
            _receipt=receipt,
        )
