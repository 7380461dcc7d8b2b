"""What the workers have announced about their models."""

import logging
from collections.abc import Iterable
from typing import cast

import redis.asyncio

from tidemill.protocol.codec import decode
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard
from tidemill_scheduler.clock import server_ms

_log = logging.getLogger(__name__)


async def load_cards(
    client: redis.asyncio.Redis, keys: ShardKeys, models: Iterable[str]
) -> dict[str, ModelCard]:
    """Return the cards of those models that have a readable one, by name."""
    names = list(models)
    async with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hget(keys.model(name), "card")
        values = cast(list[bytes | None], await pipe.execute())
    cards = {}
    for name, data in zip(names, values, strict=True):
        if data is None:
            continue
        try:
            cards[name] = decode(data, ModelCard)
        except ProtocolError as error:
            _log.warning("the card of model %s is unreadable: %s", name, error.message)
    return cards


async def known_models(client: redis.asyncio.Redis, keys: ShardKeys) -> list[str]:
    """Return the names of the models whose cards are valid, served just now or not."""
    names = await client.zrangebyscore(keys.models, await server_ms(client), "+inf")
    return [name.decode("utf-8", "replace") for name in cast(list[bytes], names)]
