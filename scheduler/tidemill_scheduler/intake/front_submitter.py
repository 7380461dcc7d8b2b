"""Turns entries of the front door into jobs."""

import logging
import os
from collections.abc import Callable, Collection, Sequence

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.calls import NewJob
from tidemill.protocol.errors import (
    InvalidRequest,
    MalformedMessage,
    Overloaded,
    StaleEpoch,
    TidemillError,
    UnknownModel,
)
from tidemill.protocol.functions import run_each_async
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard
from tidemill_scheduler.clock import server_ms
from tidemill_scheduler.fleet.cards import known_models, load_cards
from tidemill_scheduler.intake.front_entry import FrontEntry, make_front_job
from tidemill_scheduler.intake.front_outcome import Delay, Outcome
from tidemill_scheduler.intake.jobs import entry_number

_log = logging.getLogger(__name__)

_SALT_BYTES = 16
#: How soon an entry looks again for a model that no worker had registered.
_PARK_SECONDS = 1.0


class FrontSubmitter:
    """Submits entries in the name of one epoch, each only as long as it is not answered.

    The idempotency key of an entry makes a second submission find the first.

    ``served`` tells the models of the workers that live.  A model that has no card is waited for,
    ``unknown_model_seconds`` from when the entry was written.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        served: Callable[[], Collection[str]],
        unknown_model_seconds: float,
        *,
        epoch: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._served = served
        self._patience_ms = unknown_model_seconds * 1000
        self._epoch = epoch
        self._salted: set[str] = set()

    async def submit(self, entries: Sequence[FrontEntry]) -> dict[str, Outcome]:
        """Submit entries in one round trip; returns the outcome of each by its id.

        Raises ``StaleEpoch``.
        """
        if not entries:
            return {}
        made = await self._make_jobs(entries)
        outcomes: dict[str, Outcome] = {e: m for e, m in made.items() if not isinstance(m, NewJob)}
        jobs = {e: m for e, m in made.items() if isinstance(m, NewJob)}
        lacking = await self._make_salts({job.request.tenant for job in jobs.values()})
        outcomes |= {e: d for e, job in jobs.items() if (d := lacking.get(job.request.tenant))}
        ready = {e: job for e, job in jobs.items() if e not in outcomes}
        batch = [
            calls.admit(self._keys, job, epoch=self._epoch, entry_id=entry_id)
            for entry_id, job in ready.items()
        ]
        results = await run_each_async(self._client, batch)
        for entry_id, result in zip(ready, results, strict=True):
            if isinstance(result, StaleEpoch):
                raise result
            if isinstance(result, Overloaded):
                outcomes[entry_id] = Delay(result.retry_after_seconds)
            else:
                outcomes[entry_id] = result
        return outcomes

    async def _make_jobs(
        self, entries: Sequence[FrontEntry]
    ) -> dict[str, NewJob | Delay | TidemillError]:
        served = self._served() or await known_models(self._client, self._keys)
        only = next(iter(served)) if len(served) == 1 else None
        names = {name for entry in entries if (name := entry.model or only)}
        # In this order, so that a card that came while we were paused is not overlooked.
        now_ms = await server_ms(self._client)
        cards = await load_cards(self._client, self._keys, names)
        made: dict[str, NewJob | Delay | TidemillError] = {}
        for entry in entries:
            card = cards.get(entry.model or only or "")
            if card is not None:
                made[entry.entry_id] = self._make_job(entry, card)
            else:
                made[entry.entry_id] = self._without_card(entry, served, now_ms)
        return made

    def _make_job(self, entry: FrontEntry, card: ModelCard) -> NewJob | TidemillError:
        try:
            return make_front_job(entry, card, self._keys.shard)
        except TidemillError as error:
            return error
        except Exception as error:
            # As when it is read: no entry may stop the others.
            _log.exception("entry %s of the front door makes no job", entry.entry_id)
            return MalformedMessage(f"request: cannot be submitted: {type(error).__name__}")

    def _without_card(
        self, entry: FrontEntry, served: Collection[str], now_ms: int
    ) -> Delay | InvalidRequest:
        if entry.model is None and len(served) > 1:
            return InvalidRequest(
                f"request.model: several are served: {', '.join(sorted(served))}",
                field="request.model",
                fix="Say which one.",
            )
        written_ms, _ = entry_number(entry.entry_id)
        if now_ms - written_ms < self._patience_ms:
            return Delay(_PARK_SECONDS)
        return UnknownModel(
            f"request.model: no worker serves {entry.model or 'a model'!r}",
            field="request.model",
            fix="Start a worker that serves it, or correct the name.",
        )

    async def _make_salts(self, tenants: set[str]) -> dict[str, Delay]:
        """Let tenants have a salt; returns those that cannot now, for memory is full."""
        new = sorted(tenants - self._salted)
        salts = await run_each_async(
            self._client,
            [calls.salt(self._keys, tenant=t, random=os.urandom(_SALT_BYTES)) for t in new],
        )
        lacking = {}
        for tenant, salt in zip(new, salts, strict=True):
            if isinstance(salt, Overloaded):
                lacking[tenant] = Delay(salt.retry_after_seconds)
            elif isinstance(salt, Exception):
                raise salt
            else:
                self._salted.add(tenant)
        return lacking
