"""What ends a request where nobody handles it is told like any other error, and logged once."""

import asyncio
import logging
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.gateway.errors import STOPPING, error_response
from tidemill.gateway.state import GatewayState

_log = logging.getLogger(__name__)

#: How long a client may take to make room for what is told while the process stops.
GOODBYE_SECONDS = 0.5


class Failures:
    """ASGI middleware: answers 500 where a request raised, and 503 where the drain cut it off.

    To be put inside of what gives ids, counts and lets pages read, so that all of that is done for
    these answers too.  What has begun to be answered is just ended.
    """

    def __init__(self, app: ASGIApp, state: GatewayState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not self._state.is_draining:
                raise
            if not has_begun:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_SECONDS):
                        await STOPPING.response()(scope, receive, send)
        except Exception as error:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if not has_begun:
                await error_response(error)(scope, receive, send)
