"""Tells a standby that the leader is gone before its lease has run out."""

import logging

import redis.asyncio
from redis import exceptions

from tidemill.protocol import calls
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys

_log = logging.getLogger(__name__)

#: A leader that is only about to connect again must not look dead.
_LOOKS = 2


class Witness:
    """Judges one look after another; pure.

    A leader listens to the bell as long as its process lives, and only a leader does.  Where others
    listen too, or none was seen to, its lease alone decides.
    """

    def __init__(self) -> None:
        self._leader = ""
        self._was_heard = False
        self._num_silent = 0

    def saw(self, leader: str, num_listening: int) -> bool:
        """Note who holds the lease and how many listen; whether that leader is gone."""
        if leader != self._leader:
            self._leader, self._was_heard = leader, False
        if num_listening or not self._was_heard:
            self._was_heard |= num_listening > 0
            self._num_silent = 0
            return False
        self._num_silent += 1
        return self._num_silent >= _LOOKS


class Presence:
    """Gives the lease of a dead leader back in its name."""

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys) -> None:
        self._client = client
        self._keys = keys
        self._witness = Witness()

    async def check(self) -> None:
        """Look once; to be called at intervals."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(self._keys.leader)
            # redis-py leaves execute_command untyped.
            pipe.execute_command("PUBSUB", "SHARDNUMSUB", self._keys.bell)
            holder, listening = await pipe.execute(raise_on_error=False)
        if isinstance(holder, Exception):
            raise holder
        if holder is None or isinstance(listening, exceptions.ResponseError):
            return  # nobody leads, or our user may not ask who listens
        leader = holder.decode("utf-8", "replace")
        if self._witness.saw(leader, int(listening[1])):
            _log.warning("the leader %s is gone; its lease is given back", leader)
            await run_async(self._client, calls.resign(self._keys, scheduler_id=leader))
