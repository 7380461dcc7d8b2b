"""What the routes of one gateway share: clients of the queue, settings, and its open requests."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from tidemill._async_link import AsyncLink
from tidemill._async_shared import AsyncShared
from tidemill._endpoint import find_endpoint
from tidemill.access.pepper import read_pepper
from tidemill.async_client import AsyncProducer
from tidemill.batches.client import AsyncBatches
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.identity import AnyCaller, Authenticator, FixedKeys, Identity
from tidemill.gateway.metrics import GatewayMetrics
from tidemill.gateway.stored_keys import StoredKeys
from tidemill.openai.token_texts import TokenTexts
from tidemill.protocol.calls.access import NO_LIMITS, Charged
from tidemill.responses.store import ResponseStore
from tidemill.service.blobs.identity import store_identity
from tidemill.service.blobs.store import BlobStore
from tidemill.service.config import load_config, load_key_config
from tidemill.service.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

#: Clients that are kept; one without requests costs a few kB.
MAX_TENANTS = 1024
#: How long closing waits for jobs to be cancelled.
_FAREWELL_SECONDS = 5.0


class GatewayState:
    """Nothing of it outlives the process, and nothing of it is missed by another gateway."""

    def __init__(
        self, settings: GatewaySettings, *, authenticator: Authenticator | None = None
    ) -> None:
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.started_at = int(time.time())
        #: Up while the process drains: probes are told to send nobody here any more.
        self.is_draining = False
        self._stored_keys = self._key_store() if settings.require_keys else None
        self.authenticator = authenticator or self._stored_keys or _fixed(settings)
        self._shared = AsyncShared(settings.broker_seconds)
        self._producers: OrderedDict[str, AsyncProducer] = OrderedDict()
        self._blobs: BlobStore | None = None
        self._token_texts: OrderedDict[str, TokenTexts] = OrderedDict()
        self._chores: set[asyncio.Task[None]] = set()

    def producer(self, tenant: str) -> AsyncProducer:
        """Return the client for a tenant's jobs; all of them share connections and tokenizers."""
        producer = self._producers.get(tenant)
        if producer is None:
            producer = AsyncProducer(
                self.settings.redis_url,
                tenant=tenant,
                timeout=self.settings.broker_seconds,
                _shared=self._shared,
            )
            self._producers[tenant] = producer
            while len(self._producers) > MAX_TENANTS:
                self._producers.popitem(last=False)
        self._producers.move_to_end(tenant)
        return producer

    def link(self, shard: str) -> AsyncLink:
        """Return the connection to a shard."""
        endpoint = find_endpoint(self.settings.redis_url, "default", shard)
        return self._shared.links(endpoint).home

    async def charge(
        self, identity: Identity, *, requests: int = 0, tokens: int = 0
    ) -> Charged | None:
        """Take from what the caller's key may submit; None if nothing bounds that."""
        if self._stored_keys is None or identity.limits == NO_LIMITS:
            return None
        return await self._stored_keys.charge(identity, requests=requests, tokens=tokens)

    def batches(self, tenant: str) -> AsyncBatches:
        """Return the client for a tenant's files and batches."""
        return AsyncBatches(
            self.settings.redis_url, tenant=tenant, blobs=self._blob_store(), _shared=self._shared
        )

    def responses(self, tenant: str) -> ResponseStore:
        """Return where a tenant's responses are kept."""
        return ResponseStore(self.settings.redis_url, tenant=tenant, shared=self._shared)

    def blob_identity(self) -> str:
        """Return which blob store files go to; blocks, and raises ``BlobError``."""
        return store_identity(self._blob_store())

    def token_texts(self, tokenizer: Tokenizer) -> TokenTexts:
        """Return what is remembered of the texts of a tokenizer's single tokens."""
        texts = self._token_texts.get(tokenizer.digest)
        if texts is None:
            texts = self._token_texts[tokenizer.digest] = TokenTexts(tokenizer)
            while len(self._token_texts) > 4:
                self._token_texts.popitem(last=False)
        return texts

    def spawn(self, chore: Coroutine[Any, Any, None], name: str) -> None:
        """Run something that must be done although its request is over."""
        task = asyncio.create_task(chore, name=name)
        self._chores.add(task)
        task.add_done_callback(self._end_chore)

    async def close(self) -> None:
        """Finish the chores, for a few seconds at most, and close the connections."""
        if self._chores:
            await asyncio.wait(self._chores, timeout=_FAREWELL_SECONDS)
        await self._shared.close()

    def _key_store(self) -> StoredKeys:
        fixed = FixedKeys(self.settings.api_keys) if self.settings.api_keys else None
        pepper = read_pepper(load_key_config())
        return StoredKeys(self, pepper, load_config().shards, others=fixed)

    def _blob_store(self) -> BlobStore:
        if self._blobs is None:
            self._blobs = BlobStore(load_config().blob_url)
        return self._blobs

    def _end_chore(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s: %s", task.get_name(), error)


def _fixed(settings: GatewaySettings) -> Authenticator:
    return FixedKeys(settings.api_keys) if settings.api_keys else AnyCaller()
