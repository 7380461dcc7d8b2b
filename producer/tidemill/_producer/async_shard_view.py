"""The asynchronous twin of ``tidemill._producer.shard_view``."""

from typing import TYPE_CHECKING

from tidemill._async_link import AsyncLinks
from tidemill._async_submitter import AsyncSubmitter
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard
from tidemill.status import Status, details, overview

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer


class AsyncShardView:
    """The calls of an ``AsyncProducer`` that look at its shard; see ``ShardView``."""

    _keys: ShardKeys
    _links: AsyncLinks
    _submitter: AsyncSubmitter

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
