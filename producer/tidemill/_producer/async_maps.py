"""The asynchronous twin of ``tidemill._producer.maps``."""

from collections.abc import AsyncGenerator
from typing import Any, Literal, TypeVar, Unpack, overload

from tidemill._async_bulk import AsyncBulk, Items, deliver
from tidemill._async_jobs import AsyncJobs
from tidemill._async_link import AsyncLinks
from tidemill._async_submitter import AsyncSubmitter
from tidemill._items import KeyOf, PromptOf
from tidemill._map_run import HowToMap, MapOptions, MapRun, Progress
from tidemill._receipt import Receipt
from tidemill._request import JobOptions
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.keys import ShardKeys
from tidemill.result import Result

T = TypeVar("T")


class AsyncMaps:
    """How an ``AsyncProducer`` runs datasets; see ``Maps``."""

    _keys: ShardKeys
    _links: AsyncLinks
    _submitter: AsyncSubmitter
    _jobs: AsyncJobs
    _maps: set[AsyncBulk]

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

    async def _wait_for(self, receipt: Receipt) -> Result:
        return await self._jobs.result(receipt.job_id, None, receipt)

    async def _end_maps(self) -> None:
        for bulk in list(self._maps):
            await bulk.close()
