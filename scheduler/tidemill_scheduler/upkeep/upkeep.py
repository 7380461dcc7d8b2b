"""Duties without which jobs still run: they may fail and begin again, the term goes on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis import exceptions

from tidemill.protocol.errors import Overloaded
from tidemill.service.redis import translate

_log = logging.getLogger(__name__)

#: How soon a duty begins again that the server refused something.
_AGAIN_SECONDS = 5.0


async def keep_up(duty: Callable[[], Awaitable[None]]) -> None:
    """Do a duty, again and again as long as the server refuses something that it asks for.

    A server whose memory is full, or whose user may not do that, keeps nobody from leading.  Raises
    what tells that the server is away, or that another scheduler leads.
    """
    while True:
        try:
            with translate():
                return await duty()
        except (exceptions.ResponseError, Overloaded) as error:
            _log.warning("the upkeep waits, the broker refuses: %s", error)
        await asyncio.sleep(_AGAIN_SECONDS)
