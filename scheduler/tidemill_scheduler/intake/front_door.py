"""Submits what raw producers put at the front door, each entry once, and answers them."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio
from redis import exceptions

from tidemill.protocol import calls
from tidemill.protocol.calls import Entry, Fields, ReadError
from tidemill.protocol.errors import InvalidRequest, MalformedMessage, ProtocolError, TidemillError
from tidemill.protocol.functions import run_async, run_each_async
from tidemill.protocol.keys import GROUP, ShardKeys
from tidemill.service.runtime import crash_point
from tidemill_scheduler import metrics
from tidemill_scheduler.intake.front_entry import FrontEntry, parse_entry
from tidemill_scheduler.intake.front_outcome import Delay, Outcome, answer_of, name_of
from tidemill_scheduler.intake.front_submitter import FrontSubmitter
from tidemill_scheduler.intake.left_out import LeftOut
from tidemill_scheduler.intake.waiting_line import WaitingLine

_log = logging.getLogger(__name__)

#: Entries of one round trip; each may have a body of a megabyte.
_BATCH = 32
#: A new entry wakes us; this only bounds how long the wait for it lasts.
_BLOCK_SECONDS = 0.5
#: How soon we look again for a consumer group that could not be made.
_REPAIR_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Raw:
    entry_id: str
    fields: Fields


class FrontDoor:
    """Reads as the group's only consumer, in the name of one epoch, what is pending first.

    The answer takes an entry off the stream; until then it is pending, and the next leader's.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        epoch: int,
        submitter: FrontSubmitter,
    ) -> None:
        self._client = client
        self._keys = keys
        self._epoch = epoch
        self._submitter = submitter
        self._waiting = WaitingLine()
        self._left_out = LeftOut(self._waiting)
        #: The entry behind which this leader reads on.
        self._position = "0-0"

    async def run(self) -> None:
        """Serve for ever.  Raises ``StaleEpoch``."""
        await self._make_group()
        while True:
            await self._try_again()
            self._position = self._left_out.rewind() or self._position
            if not await self._take_in():
                await self._wait()

    async def _take_in(self) -> bool:
        """Handle the next entries; false if there are none."""
        positions = {self._keys.front_door: self._position}
        call = calls.read(self._keys, epoch=self._epoch, positions=positions, count=_BATCH)
        [entries] = (await run_async(self._client, call)).entries
        if isinstance(entries, ReadError):
            await self._repair(entries)
            return False
        if not entries:
            return False
        self._position = entries[-1][0].decode()
        crash_point("scheduler.front_after_read")
        await self._drop([entry_id for entry_id, fields in entries if fields is None])
        await self._handle([_Raw(e.decode(), f) for e, f in entries if f is not None], {})
        return True

    async def _try_again(self) -> None:
        lanes = self._waiting.take_due(time.monotonic(), _BATCH)
        if not lanes:
            return
        ids = [entry_id for lane in lanes.values() for entry_id in lane]
        async with self._client.pipeline(transaction=False) as pipe:
            for entry_id in ids:
                pipe.xrange(self._keys.front_door, entry_id, entry_id)
            found = cast(list[list[Entry]], await pipe.execute())
        await self._drop([i.encode() for i, entries in zip(ids, found, strict=True) if not entries])
        entries = (entry for entries in found for entry in entries)
        await self._handle([_Raw(e.decode(), f) for e, f in entries if f is not None], lanes)

    async def _drop(self, entry_ids: Sequence[bytes]) -> None:
        """Forget pending entries that are not on the stream any more."""
        if entry_ids:
            await self._client.xack(self._keys.front_door, GROUP, *entry_ids)

    async def _handle(self, entries: Sequence[_Raw], taken: Mapping[str, Sequence[str]]) -> None:
        """Submit and answer entries, but those that must wait; ``taken`` names their lanes."""
        # A body of a megabyte takes its time, and the lease must be renewed meanwhile.
        parsed = await asyncio.to_thread(_parse_all, entries)
        ready: list[FrontEntry] = []
        outcomes: dict[str, Outcome] = {}
        for raw, entry in zip(entries, parsed, strict=True):
            if isinstance(entry, TidemillError):
                outcomes[raw.entry_id] = entry
            elif entry.lane in self._waiting and entry.lane not in taken:
                self._line_up(entry)
            else:
                ready.append(entry)
        outcomes |= await self._submitter.submit(ready)
        crash_point("scheduler.front_after_submit")
        await self._drop([e.encode() for e, outcome in outcomes.items() if outcome is None])
        await self._answer(entries, outcomes)
        self._let_wait(ready, outcomes, taken)

    def _line_up(self, entry: FrontEntry) -> None:
        """Let an entry wait behind those of its lane, unless it was read again."""
        if self._waiting.holds(entry.entry_id):
            return
        if not self._left_out.add(entry.lane, entry.entry_id):
            self._waiting.append(entry.lane, entry.entry_id)

    async def _answer(self, entries: Sequence[_Raw], outcomes: Mapping[str, Outcome]) -> None:
        bodies = {entry.entry_id: entry.fields.get(b"body", b"") for entry in entries}
        for outcome in outcomes.values():
            metrics.FRONT.labels(name_of(outcome)).inc()
        answers = (answer_of(self._keys, e, o, bodies[e]) for e, o in outcomes.items())
        batch = [answer for answer in answers if answer is not None]
        for result in await run_each_async(self._client, batch):
            if isinstance(result, Exception):
                # It stays pending, and the next leader answers it.
                _log.warning("an entry of the front door cannot be answered: %s", result)

    def _let_wait(
        self,
        entries: Sequence[FrontEntry],
        outcomes: Mapping[str, Outcome],
        taken: Mapping[str, Sequence[str]],
    ) -> None:
        now = time.monotonic()
        delayed: defaultdict[str, list[str]] = defaultdict(list)
        until = dict.fromkeys(taken, now)
        for entry in entries:
            outcome = outcomes[entry.entry_id]
            if isinstance(outcome, Delay):
                delayed[entry.lane].append(entry.entry_id)
                until[entry.lane] = max(until.get(entry.lane, now), now + outcome.seconds)
        for lane, due in until.items():
            self._waiting.put(lane, delayed[lane], due)
        metrics.FRONT_WAITING.set(len(self._waiting))

    async def _wait(self) -> None:
        """Return when there may be something new, or a lane is due."""
        due = self._waiting.next_at
        wait = _BLOCK_SECONDS if due is None else due - time.monotonic()
        wait = min(max(wait, 0.001), _BLOCK_SECONDS)
        # Not as the group: a read that blocks cannot be fenced.  It shows whether one is worth it.
        streams: Any = {self._keys.front_door: self._position}
        await self._client.xread(streams, count=1, block=round(wait * 1000))

    async def _make_group(self) -> None:
        try:
            await self._client.xgroup_create(self._keys.front_door, GROUP, id="0", mkstream=True)
        except exceptions.ResponseError as error:
            # There is one already; or memory is full, and nobody can add to the stream either.
            _log.debug("the group of the front door is not made: %s", error)

    async def _repair(self, error: ReadError) -> None:
        if not error.message.startswith("NOGROUP"):
            raise exceptions.ResponseError(error.message)
        # The server has lost its data.
        self._position = "0-0"
        await self._make_group()
        await asyncio.sleep(_REPAIR_SECONDS)


def _parse_all(entries: Sequence[_Raw]) -> list[FrontEntry | TidemillError]:
    return [_parse(entry) for entry in entries]


def _parse(entry: _Raw) -> FrontEntry | TidemillError:
    try:
        return parse_entry(entry.entry_id, entry.fields)
    except (InvalidRequest, ProtocolError) as error:
        return error
    except Exception as error:
        # Anybody may write here: what one entry breaks must not keep the others waiting.
        _log.exception("entry %s of the front door cannot be read", entry.entry_id)
        return MalformedMessage(f"body: cannot be read: {type(error).__name__}")
