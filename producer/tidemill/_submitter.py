"""Turns prompts into queued jobs: model, salt and tokenizer looked up, all of it remembered."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill._catalogue import SALT_BYTES, Catalogue
from tidemill._endpoint import Endpoint
from tidemill._job_options import SharedOptions
from tidemill._link import Link
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
from tidemill.service.runtime import crash_point
from tidemill.service.tokenizer_cache import HAS_TOKENIZERS, RedisTokenizers, TokenizerStore

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer

#: Lost jobs that are submitted again in one round trip.
_PAGE_SIZE = 256


class Submitter:
    """Submits the jobs of one client."""

    def __init__(self, link: Link, endpoint: Endpoint, *, replicated: bool = False) -> None:
        self._link = link
        self._replicated = replicated
        self._endpoint = endpoint
        self._catalogue = Catalogue()
        #: What is known of the jobs whose handles somebody still holds.
        self.fates = Fates()
        self._tokenizers = RedisTokenizers(endpoint.keys, TokenizerStore(endpoint.cache_dir))

    def submit_many(self, specs: Sequence[JobSpec]) -> list[Receipt | TidemillError]:
        """Queue jobs in one round trip; an error takes the place of a refused job's receipt."""
        return self.send(self.make(specs))

    def make(self, specs: Sequence[JobSpec]) -> list[NewJob | InvalidRequest]:
        """Return the jobs to send; an error takes the place of one that cannot be made."""
        shared = SharedOptions()
        return [self._make_job(spec, shared) for spec in specs]

    def send(self, made: Sequence[NewJob | InvalidRequest]) -> list[Receipt | TidemillError]:
        """Queue what was made; sent again it finds what was accepted before, by the jobs' ids."""
        crash_point("producer.before_submit")
        sent = self._send(valid_jobs(made))
        crash_point("producer.after_submit")
        self.fates.add(sent)
        return fill_in(made, sent)

    def resubmit(self, lost: Sequence[Receipt]) -> list[TidemillError | None]:
        """Submit jobs again that a server has lost, and renew their receipts.

        An error tells in the place of its job why not: ``ResultExpired`` if it was not lost.
        """
        problems: list[TidemillError | None] = []
        for start in range(0, len(lost), _PAGE_SIZE):
            problems += self._resubmit(lost[start : start + _PAGE_SIZE])
        return problems

    def _resubmit(self, lost: Sequence[Receipt]) -> list[TidemillError | None]:
        found = self._link.read(survey(self._endpoint.keys, lost))
        problems, chosen = triage(lost, found)
        failures = renew_all(chosen, self._send([receipt.job for receipt in chosen]))
        return [
            problem or failures.get(receipt.job_id)
            for receipt, problem in zip(lost, problems, strict=True)
        ]

    def card(self, name: str | None) -> ModelCard:
        """Return a model's card, of the only model if ``name`` is None; raises ``UnknownModel``."""
        card = self._catalogue.card(name)
        if card is None:
            card = self._read_card(name or choose_model(self._served_models()))
            self._catalogue.remember(name, card)
        return card

    def cards(self) -> tuple[ModelCard, ...]:
        """Return all models' cards, by name."""
        keys = self._endpoint.keys
        names = self._link.read(model_names(keys))
        found = [self._link.read(model_card(keys, name)) for name in names]
        return tuple(card for card in found if card is not None)

    def tokenizer(self, card: ModelCard) -> "Tokenizer":
        """Return the tokenizer that a card names; raises ``UnknownModel`` or ``ConfigError``."""
        return self._link.retry(lambda: self._tokenizers.get(self._link.client, card))

    def _send(self, jobs: Sequence[NewJob]) -> list[Receipt | TidemillError]:
        if not jobs:
            return []
        wait_ms = replica_wait_ms(self._link.timeout) if self._replicated else None
        submits = submit_calls(self._endpoint.keys, jobs, wait_ms=wait_ms)
        try:
            return receipts(jobs, self._link.call_many(submits))
        except SaltMissing:
            self._fetch_salt()
            return receipts(jobs, self._link.call_many(submits))

    def _make_job(self, spec: JobSpec, shared: SharedOptions) -> NewJob | InvalidRequest:
        try:
            draft = spec.draft(self._endpoint.tenant, shared)
            card = self.card(draft.model)
            job_id = new_job_id(self._endpoint.keys.shard)
            return make_job(job_id, draft, card, self._salt(), self._tokenizer(draft, card))
        except InvalidRequest as error:
            return error

    def _tokenizer(self, draft: Draft, card: ModelCard) -> "Tokenizer | None":
        if draft.has_tokens or not HAS_TOKENIZERS:
            return None
        return self.tokenizer(card)

    def _salt(self) -> bytes:
        return self._catalogue.salt or self._fetch_salt()

    def _fetch_salt(self) -> bytes:
        keys, tenant = self._endpoint.keys, self._endpoint.tenant
        salt = self._link.call(calls.salt(keys, tenant=tenant, random=os.urandom(SALT_BYTES)))
        self._catalogue.salt = salt
        return salt

    def _read_card(self, name: str) -> ModelCard:
        keys = self._endpoint.keys
        card = self._link.read(model_card(keys, name))
        if card is not None:
            return card
        names = self._link.read(model_names(keys))
        for model in names:
            card = self._link.read(model_card(keys, model))
            if card is not None and has_adapter(card, name):
                return card
        raise unknown_model(name, names)

    def _served_models(self) -> Sequence[str]:
        # Models of live workers go first: the cards of yesterday's are still there.
        keys = self._endpoint.keys
        served = self._link.read(models_of(keys, self._link.read(live_workers(keys))))
        return served or self._link.read(model_names(keys))
