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


def read(client: redis.Redis, commands: Sequence[Command], *, at_once: bool = False) -> list[Any]:
    """Send commands in one round trip; raises ``BrokerError`` if one is refused.

    ``at_once``: nothing else happens in between; for few and cheap commands.
    """
    replies = _send(client, commands, at_once=at_once)
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, Exception):
            raise BrokerError(
                f"the broker refused {command[0]!s}: {reply}",
                fix="Ask as a user that may read everything, such as `reader` in docker/acl.",
            ) from reply
    return replies


def _send(client: redis.Redis, commands: Sequence[Command], *, at_once: bool = False) -> list[Any]:
    if not commands:
        return []
    with translate(), client.pipeline(transaction=at_once) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        replies = pipeline.execute(raise_on_error=False)
        for reply in replies:
            # A server that is away is no property of one command.
            if isinstance(reply, Exception) and not isinstance(reply, exceptions.ResponseError):
                raise reply
    return list(replies)
