"""Connections that ask where their server is each time they connect.

Everything a process does concerns one shard, whose keys share a slot and so live on one server.
Only where that is may change: then the connection breaks, and whatever retries finds the new one.
"""

from collections.abc import Mapping
from typing import Any

import redis.asyncio.connection as asyncio_connection
from redis import connection, exceptions

from tidemill.service.broker_url import Address
from tidemill.service.routing import Routing, Seeds, not_found

#: What a server answers that is not, not yet or no longer the one to talk to.
_MOVED_AWAY = (
    exceptions.ReadOnlyError,
    exceptions.MovedError,
    exceptions.AskError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
)
#: The same from errors that redis-py has no class for: a blocking read of a master that was
#: demoted, a master without replicas to write to.
_MOVED_AWAY_CODES = ("UNBLOCKED", "NOREPLICAS")


class Locator:
    """Finds the server by asking one seed after the other; safe to use from several threads."""

    def __init__(
        self, routing: Routing, seeds: Seeds, connection_class: type, options: Mapping[str, Any]
    ) -> None:
        self._routing = routing
        self._seeds = seeds
        self._connection_class = connection_class
        self._options = options

    def find(self) -> Address:
        """Return the server's address.

        Raises redis-py's ``ConnectionError`` (``AuthenticationError``) if no seed knows it now,
        ``BrokerUnsupported`` if all refuse to tell.
        """
        failures: list[tuple[Address, Exception | None]] = []
        for seed in self._seeds.in_turn():
            try:
                answer = self._routing.understand(self._ask(seed), seed)
            except exceptions.RedisError as error:
                failures.append((seed, error))
                continue
            self._seeds.learn(answer.seeds)
            if answer.server is not None:
                return answer.server
            failures.append((seed, None))
        raise not_found(self._routing, failures)

    def _ask(self, seed: Address) -> Any:
        # No pool: it takes the session tickets that follow a TLS handshake for a stray reply.
        asked = self._connection_class(host=seed.host, port=seed.port, **self._options)
        try:
            asked.send_command(*self._routing.question)
            return asked.read_response()
        finally:
            asked.disconnect()


class AsyncLocator:
    """The asynchronous twin of ``Locator``."""

    def __init__(
        self, routing: Routing, seeds: Seeds, connection_class: type, options: Mapping[str, Any]
    ) -> None:
        self._routing = routing
        self._seeds = seeds
        self._connection_class = connection_class
        self._options = options

    async def find(self) -> Address:
        """Return the server's address; see ``Locator.find``."""
        failures: list[tuple[Address, Exception | None]] = []
        for seed in self._seeds.in_turn():
            try:
                answer = self._routing.understand(await self._ask(seed), seed)
            except exceptions.RedisError as error:
                failures.append((seed, error))
                continue
            self._seeds.learn(answer.seeds)
            if answer.server is not None:
                return answer.server
            failures.append((seed, None))
        raise not_found(self._routing, failures)

    async def _ask(self, seed: Address) -> Any:
        asked = self._connection_class(host=seed.host, port=seed.port, **self._options)
        try:
            await asked.send_command(*self._routing.question)
            return await asked.read_response()
        finally:
            await asked.disconnect(nowait=True)


class RoutedConnection(connection.Connection):
    """A connection to whichever server ``locator`` finds."""

    def __init__(self, *, locator: Locator, **options: Any) -> None:
        self._locator = locator
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        """Find the server, then connect to it."""
        if not self.is_connected:
            self.host, self.port = self._locator.find()
        super().connect_check_health(*args, **options)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply; one that sends us elsewhere is a ``ConnectionError``."""
        try:
            return super().read_response(*args, **options)
        except exceptions.ResponseError as error:
            if not _sends_elsewhere(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise _elsewhere(self, error) from error


class RoutedSSLConnection(RoutedConnection, connection.SSLConnection):
    """The same over TLS."""


class AsyncRoutedConnection(asyncio_connection.Connection):
    """The asynchronous twin of ``RoutedConnection``."""

    def __init__(self, *, locator: AsyncLocator, **options: Any) -> None:
        self._locator = locator
        super().__init__(**options)

    async def connect_check_health(self, *args: Any, **options: Any) -> None:
        """Find the server, then connect to it."""
        if not self.is_connected:
            self.host, self.port = await self._locator.find()
        await super().connect_check_health(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply; one that sends us elsewhere is a ``ConnectionError``."""
        try:
            return await super().read_response(*args, **options)
        except exceptions.ResponseError as error:
            if not _sends_elsewhere(error):
                raise
            await self.disconnect(nowait=True)
            raise _elsewhere(self, error) from error


class AsyncRoutedSSLConnection(AsyncRoutedConnection, asyncio_connection.SSLConnection):
    """The same over TLS."""


def _sends_elsewhere(error: exceptions.ResponseError) -> bool:
    return isinstance(error, _MOVED_AWAY) or str(error).startswith(_MOVED_AWAY_CODES)


def _elsewhere(
    used: connection.Connection | asyncio_connection.Connection, error: exceptions.ResponseError
) -> exceptions.ConnectionError:
    said = f"{type(error).__name__}: {error}"
    return exceptions.ConnectionError(f"{used.host}:{used.port} serves us no longer ({said})")
