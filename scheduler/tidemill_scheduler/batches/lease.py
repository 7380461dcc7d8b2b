"""The right to work on one batch, held for as long as the work goes on."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tidemill._async_link import AsyncLink
from tidemill.protocol import calls
from tidemill.protocol.batches import BatchState
from tidemill.protocol.calls import Leased
from tidemill.protocol.errors import StaleFence
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys

_log = logging.getLogger(__name__)

_RENEWALS = 5
_MAX_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class BatchName:
    """A batch and whose it is."""

    tenant: str
    batch_id: str

    @classmethod
    def read(cls, member: bytes) -> "BatchName | None":
        """Return what a member of ``bw`` names, None if it is none of ours."""
        tenant, _, batch_id = member.decode("utf-8", "replace").partition(" ")
        return cls(tenant, batch_id) if batch_id and " " not in batch_id else None


@dataclass(slots=True)
class LineCounts:
    """Lines answered and failed so far."""

    num_answered: int = 0
    num_failed: int = 0


class BatchLease:
    """One process's claim to a batch.

    ``ending`` is "cancelled" or "expired" once the batch must come to its end early, and
    ``is_ending`` is set then.
    """

    def __init__(
        self,
        link: AsyncLink,
        keys: ShardKeys,
        name: BatchName,
        *,
        owner: str,
        lease_seconds: float,
        counts: Callable[[], LineCounts],
    ) -> None:
        self._link, self._keys, self._name = link, keys, name
        self._owner, self._lease_seconds = owner, lease_seconds
        self._counts = counts
        #: Parts of which jobs may have been submitted.
        self.cursor = 0
        self.ending = ""
        self.is_ending = asyncio.Event()

    async def take(self) -> bool:
        """Ask for the batch; false if another one works on it, or it has ended."""
        return (await self._renew()).ok

    async def hold(self) -> None:
        """Renew the lease for ever; raises ``StaleFence`` once it is another's."""
        pause = min(self._lease_seconds / _RENEWALS, _MAX_PAUSE_SECONDS)
        while True:
            await asyncio.sleep(pause)
            await self.look()

    async def look(self) -> None:
        """Learn whether the batch is to end early; raises ``StaleFence``."""
        self._check(await self._renew())

    async def begin_part(self, number: int) -> None:
        """Note that jobs of a part may be submitted from now on; raises ``StaleFence``."""
        self.cursor = max(self.cursor, number + 1)
        await self.look()

    async def release(self) -> None:
        """Let another process go on at once."""
        await self._link.call(self._call(0))

    async def turn(
        self, was: BatchState, becomes: BatchState, *fields: str | bytes | int | float
    ) -> bool:
        """Move the batch on; false if it was in another state.  Raises ``StaleFence``."""
        call = calls.turn_batch(
            self._keys,
            self._name.tenant,
            self._name.batch_id,
            owner=self._owner,
            was=was,
            becomes=becomes,
            fields=fields,
        )
        code, state = await self._link.call(call)
        if code < 0:
            raise self._lost()
        _log.info("%s: %s -> %s", self._name.batch_id, was, state)
        return code == 1

    @property
    def owner(self) -> str:
        """Who holds it."""
        return self._owner

    def _check(self, leased: Leased) -> None:
        if not leased.ok and not (leased.state and BatchState(leased.state).is_terminal):
            raise self._lost()

    def _lost(self) -> StaleFence:
        return StaleFence(f"another process works on {self._name.batch_id}")

    async def _renew(self) -> Leased:
        leased = await self._link.call(self._call(round(self._lease_seconds * 1000)))
        if leased.ok and not self.ending:
            if leased.state == BatchState.CANCELLING:
                self._end("cancelled")
            elif leased.now_ms >= leased.expires_ms and leased.state == BatchState.IN_PROGRESS:
                self._end("expired")
        return leased

    def _end(self, ending: str) -> None:
        self.ending = ending
        self.is_ending.set()

    def _call(self, lease_ms: int) -> Call[Leased]:
        counts = self._counts()
        return calls.lease_batch(
            self._keys,
            self._name.tenant,
            self._name.batch_id,
            owner=self._owner,
            lease_ms=lease_ms,
            cursor=self.cursor,
            num_answered=counts.num_answered,
            num_failed=counts.num_failed,
        )
