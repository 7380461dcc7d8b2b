"""The other side of the queue: the models that are served, the state of the shard."""

from typing import TYPE_CHECKING

from tidemill._link import Links
from tidemill._submitter import Submitter
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard
from tidemill.status import Status, details, overview

if TYPE_CHECKING:  # the SDK works without the tokenizer extra
    from tidemill.service.tokenizer import Tokenizer


class ShardView:
    """The calls of a ``Producer`` that look at its shard."""

    _keys: ShardKeys
    _links: Links
    _submitter: Submitter

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
