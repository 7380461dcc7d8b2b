"""Sending read-only commands of which this user may be refused some."""

from collections.abc import Sequence
from typing import Any

import redis
from redis import exceptions

from tidemill.protocol.errors import BrokerError
from tidemill.protocol.functions import Field
from tidemill.service.redis import translate

Command = tuple[Field, ...]


def ask(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    """Send commands in one round trip; a refused or unknown one is answered by None.

    Raises ``BrokerUnavailable``.
    """
    return [None if isinstance(reply, Exception) else reply for reply in _send(client, commands)]


def read(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    """Send commands in one round trip; raises ``BrokerError`` if one is refused."""
    replies = _send(client, commands)
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, Exception):
            raise BrokerError(
                f"the broker refused {str(command[0])}: {reply}",
                fix="Ask as a user that may read everything, such as `reader` in docker/acl.",
            ) from reply
    return replies


def _send(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    if not commands:
        return []
    with translate(), client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        replies = pipeline.execute(raise_on_error=False)
        for reply in replies:
            # A server that is away is no property of one command.
            if isinstance(reply, Exception) and not isinstance(reply, exceptions.ResponseError):
                raise reply
    return list(replies)
