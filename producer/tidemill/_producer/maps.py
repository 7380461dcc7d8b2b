"""A dataset: a job for each item, and the results as they come."""

from collections.abc import Generator, Iterable
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Literal, TypeVar, Unpack, overload
from weakref import WeakSet

from tidemill._bulk import Bulk, deliver
from tidemill._items import KeyOf, PromptOf
from tidemill._link import Links
from tidemill._map_run import HowToMap, MapOptions, MapRun, Progress
from tidemill._request import JobOptions
from tidemill._submitter import Submitter
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.keys import ShardKeys
from tidemill.result import Result

T = TypeVar("T")


class Maps:
    """How a ``Producer`` runs datasets; its runs end with it."""

    _keys: ShardKeys
    _links: Links
    _submitter: Submitter
    _maps: WeakSet[Generator[Any, None, None]]

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

    def _end_maps(self) -> None:
        for outcomes in list(self._maps):
            if getgeneratorstate(outcomes) != GEN_RUNNING:
                outcomes.close()
