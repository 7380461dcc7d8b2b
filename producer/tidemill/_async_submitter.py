"""The asynchronous twin of ``tidemill._submitter``."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidemill._async_link import AsyncLink
from tidemill._catalogue import SALT_BYTES, Catalogue
from tidemill._endpoint import Endpoint
from tidemill._job_options import SharedOptions
from tidemill._patience import SaltMissing
from tidemill._reads import live_workers, model_card, model_names, models_of
from tidemill._receipt import (
    Fates,
    Receipt,
    fill_in,
    receipts,
    renew_all,
    replica_wait_ms,
    submit_calls,
    survey,
    triage,
    valid_jobs,
)
from tidemill._request import Draft, JobSpec, choose_model, has_adapter, make_job, unknown_model
from tidemill.protocol import calls
from tidemill.protocol.calls import NewJob
from tidemill.protocol.errors import InvalidRequest, TidemillError
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import ModelCard
from tidemill.service.offload import beside_loop
from tidemill.service.runtime import crash_point
from tidemill.service.tokenizer_cache import HAS_TOKENIZERS, AsyncRedisTokenizers, TokenizerStore

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer

#: From this size on, tokenising and hashing would hold up the event loop for milliseconds.
_LONG_BYTES = 16 * 1024

#: Is told of jobs that are about to be queued, and raises if they may not be.
Charge = Callable[[Sequence[NewJob]], Awaitable[None]]

#: Lost jobs that are submitted again in one round trip.
_PAGE_SIZE = 256
#: Jobs that are checked at once, jobs that are packed at once, and tokens of their prompts: so long
#: the event loop stands still, for a few milliseconds.
_JOBS_AT_ONCE = 16
_PACKED_JOBS = 64
_PACKED_TOKENS = 1 << 16


class AsyncSubmitter:
    """Submits the jobs of one client."""

    def __init__(
        self,
        link: AsyncLink,
        endpoint: Endpoint,
        tokenizers: TokenizerStore,
        *,
        replicated: bool = False,
    ) -> None:
        self._link = link
        self._replicated = replicated
        self._endpoint = endpoint
        self._catalogue = Catalogue()
        #: What is known of the jobs whose handles somebody still holds.
        self.fates = Fates()
        self._tokenizers = AsyncRedisTokenizers(endpoint.keys, tokenizers)

    async def submit_many(
        self, specs: Sequence[JobSpec], charge: Charge | None = None
    ) -> list[Receipt | TidemillError]:
        """Queue jobs; an error takes the place of a refused job's receipt.

        One round trip does for all, unless they are so many or so long that packing takes its time.

        ``charge`` is told the jobs before, and none is queued if it raises.
        """
        made = await self.make(specs)
        if charge is not None:
            await charge(valid_jobs(made))
        return await self.send(made)

    async def make(self, specs: Sequence[JobSpec]) -> list[NewJob | InvalidRequest]:
        """Return the jobs to send; an error takes the place of one that cannot be made."""
        made: list[NewJob | InvalidRequest] = []
        num_bytes, shared = 0, SharedOptions()
        for index, spec in enumerate(specs, 1):
            if index % _JOBS_AT_ONCE == 0:
                # Others have their turn.
                await asyncio.sleep(0)
            try:
                draft = spec.draft(self._endpoint.tenant, shared)
                # Many short ones hold up the event loop as a long one does.
                num_bytes += draft.num_bytes
                is_long = num_bytes >= _LONG_BYTES
                made.append(await self._make_job(draft, is_long=is_long))
                num_bytes = 0 if is_long else num_bytes
            except InvalidRequest as error:
                made.append(error)
        return made

    async def send(self, made: Sequence[NewJob | InvalidRequest]) -> list[Receipt | TidemillError]:
        """Queue what was made; sent again it finds what was accepted before, by the jobs' ids."""
        crash_point("producer.before_submit")
        sent = await self._send(valid_jobs(made))
        crash_point("producer.after_submit")
        self.fates.add(sent)
        return fill_in(made, sent)

    async def resubmit(self, lost: Sequence[Receipt]) -> list[TidemillError | None]:
        """Submit jobs again that a server has lost, and renew their receipts.

        An error tells in the place of its job why not: ``ResultExpired`` if it was not lost.
        """
        problems: list[TidemillError | None] = []
        for start in range(0, len(lost), _PAGE_SIZE):
            problems += await self._resubmit(lost[start : start + _PAGE_SIZE])
        return problems

    async def _resubmit(self, lost: Sequence[Receipt]) -> list[TidemillError | None]:
        found = await self._link.read(survey(self._endpoint.keys, lost))
        problems, chosen = triage(lost, found)
        failures = renew_all(chosen, await self._send([receipt.job for receipt in chosen]))
        return [
            problem or failures.get(receipt.job_id)
            for receipt, problem in zip(lost, problems, strict=True)
        ]

    async def card(self, name: str | None) -> ModelCard:
        """Return a model's card, of the only model if ``name`` is None; raises ``UnknownModel``."""
        card = self._catalogue.card(name)
        if card is None:
            card = await self._read_card(name or choose_model(await self._served_models()))
            self._catalogue.remember(name, card)
        return card

    async def cards(self) -> tuple[ModelCard, ...]:
        """Return all models' cards, by name."""
        keys = self._endpoint.keys
        names = await self._link.read(model_names(keys))
        found = [await self._link.read(model_card(keys, name)) for name in names]
        return tuple(card for card in found if card is not None)

    async def tokenizer(self, card: ModelCard) -> "Tokenizer":
        """Return the tokenizer that a card names; raises ``UnknownModel`` or ``ConfigError``."""
        return await self._link.retry(lambda: self._tokenizers.get(self._link.client, card))

    async def _send(self, jobs: Sequence[NewJob]) -> list[Receipt | TidemillError]:
        sent: list[Receipt | TidemillError] = []
        for page in _pages(jobs):
            sent += await self._send_page(page)
        return sent

    async def _send_page(self, jobs: Sequence[NewJob]) -> list[Receipt | TidemillError]:
        wait_ms = replica_wait_ms(self._link.timeout) if self._replicated else None
        submits = submit_calls(self._endpoint.keys, jobs, wait_ms=wait_ms)
        try:
            return receipts(jobs, await self._link.call_many(submits))
        except SaltMissing:
            await self._fetch_salt()
            return receipts(jobs, await self._link.call_many(submits))

    async def _make_job(self, draft: Draft, *, is_long: bool) -> NewJob:
        card = await self.card(draft.model)
        salt, tokenizer = await self._salt(), await self._tokenizer(draft, card)
        job_id = new_job_id(self._endpoint.keys.shard)
        make = partial(make_job, job_id, draft, card, salt, tokenizer)
        return await beside_loop(make) if is_long else make()

    async def _tokenizer(self, draft: Draft, card: ModelCard) -> "Tokenizer | None":
        if draft.has_tokens or not HAS_TOKENIZERS:
            return None
        return await self.tokenizer(card)

    async def _salt(self) -> bytes:
        return self._catalogue.salt or await self._fetch_salt()

    async def _fetch_salt(self) -> bytes:
        keys, tenant = self._endpoint.keys, self._endpoint.tenant
        salt = await self._link.call(calls.salt(keys, tenant=tenant, random=os.urandom(SALT_BYTES)))
        self._catalogue.salt = salt
        return salt

    async def _read_card(self, name: str) -> ModelCard:
        keys = self._endpoint.keys
        card = await self._link.read(model_card(keys, name))
        if card is not None:
            return card
        names = await self._link.read(model_names(keys))
        for model in names:
            card = await self._link.read(model_card(keys, model))
            if card is not None and has_adapter(card, name):
                return card
        raise unknown_model(name, names)

    async def _served_models(self) -> Sequence[str]:
        # Models of live workers go first: the cards of yesterday's are still there.
        keys = self._endpoint.keys
        served = await self._link.read(models_of(keys, await self._link.read(live_workers(keys))))
        return served or await self._link.read(model_names(keys))


def _pages(jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
    """Yield the jobs in runs of ``_PACKED_JOBS`` and ``_PACKED_TOKENS``, or of one with more."""
    start = num_tokens = 0
    for index, job in enumerate(jobs):
        num_tokens += job.cost
        if index - start == _PACKED_JOBS or (index > start and num_tokens > _PACKED_TOKENS):
            yield jobs[start:index]
            start, num_tokens = index, job.cost
    if jobs:
        yield jobs[start:]
