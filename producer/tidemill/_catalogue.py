"""What a client remembers of the models and of its tenant's salt; pure, shared by both clients."""

import time

from tidemill.protocol.messages import ModelCard

#: A card is looked up again after so long: workers may bring another revision of a model.
CARD_SECONDS = 5.0

SALT_BYTES = 16


class Catalogue:
    """The cards seen lately, by the name asked for, and the salt."""

    def __init__(self) -> None:
        self._cards: dict[str | None, tuple[float, ModelCard]] = {}
        self.salt: bytes | None = None

    def card(self, name: str | None) -> ModelCard | None:
        """Return the card last seen for ``name`` if it is recent; None asks for the only model."""
        seen_at, card = self._cards.get(name, (0.0, None))
        return card if time.monotonic() - seen_at < CARD_SECONDS else None

    def remember(self, name: str | None, card: ModelCard) -> None:
        """Note the card just read for ``name``."""
        self._cards[name] = (time.monotonic(), card)
