"""A client whose connection breaks on command, before or after the server has acted."""

from collections.abc import Callable
from typing import Any

import redis
from redis.client import Pipeline


class LossyPipeline(Pipeline):
    """Executes at the mercy of its client."""

    outage: Callable[[Callable[[], Any]], Any]

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Execute, or lose the commands or their replies."""
        return self.outage(lambda: super(LossyPipeline, self).execute(raise_on_error))  # type: ignore[no-any-return]


class LossyRedis:
    """Stands in for a client where only pipelines are used.

    ``lose_replies`` and ``lose_commands`` are the numbers of pipelines to be lost next.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.lose_replies = 0
        self.lose_commands = 0

    def pipeline(self, transaction: bool = True) -> LossyPipeline:
        """A pipeline that may be lost."""
        pipe = LossyPipeline(
            self._client.connection_pool, self._client.response_callbacks, transaction, None
        )
        pipe.outage = self._outage
        return pipe

    def _outage(self, execute: Callable[[], Any]) -> Any:
        if self.lose_commands:
            self.lose_commands -= 1
            raise redis.ConnectionError("lost before the server saw it")
        replies = execute()
        if self.lose_replies:
            self.lose_replies -= 1
            raise redis.ConnectionError("lost after the server acted")
        return replies
