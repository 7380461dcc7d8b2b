"""One batch, from its first look to its end, by the holder of its lease."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from enum import Enum, auto
from typing import Any

from tidemill.batches.lines import RequestLine
from tidemill.batches.paging import hashes
from tidemill.batches.validation import Survey, read_part, survey
from tidemill.protocol import calls
from tidemill.protocol.batches import Batch, BatchState, LineError, told_errors
from tidemill.protocol.errors import BlobNotFound, BrokerUnavailable, StaleFence
from tidemill.protocol.files import file_blob
from tidemill.protocol.ids import new_file_id
from tidemill.service.runtime import crash_point
from tidemill_scheduler.batches.batch_files import NO_FILES, BatchFiles
from tidemill_scheduler.batches.lease import BatchLease, BatchName, LineCounts
from tidemill_scheduler.batches.line_jobs import LineJobs, forgone
from tidemill_scheduler.batches.parts import OutputBlobs, Part
from tidemill_scheduler.batches.setbacks import may_pass
from tidemill_scheduler.batches.tools import BatchTools
from tidemill_scheduler.tasks import end_tasks, run_together

_log = logging.getLogger(__name__)


class Outcome(Enum):
    """What a run came to: the end, a part of the way, or that another process works on it."""

    ENDED = auto()
    GAVE_BACK = auto()
    ELSEWHERE = auto()


class BatchRun:
    """Brings one batch a state further until it has ended; whoever does it again does no harm."""

    def __init__(self, tools: BatchTools, name: BatchName, owner: str) -> None:
        self._tools, self._name = tools, name
        self._output = OutputBlobs(tools.blobs, tools.keys, name)
        self._files = BatchFiles(tools.link, tools.keys, name, self._output)
        self._counted = LineCounts()
        self._parts: dict[int, Part] = {}
        self._state = ""
        self._is_leaving = self._has_left = False
        self._lease = BatchLease(
            tools.link,
            tools.keys,
            name,
            owner=owner,
            lease_seconds=tools.settings.lease_seconds,
            counts=self._count,
        )

    async def run(self) -> Outcome:
        """Work until the batch has ended or has given its place back.

        Raises ``StaleFence`` if it was taken away, ``BrokerUnavailable`` and ``BlobError``.
        """
        if not await self._leased(self._work):
            return Outcome.ELSEWHERE
        if not self._has_left:
            return Outcome.ENDED
        await self.release()
        return Outcome.GAVE_BACK

    def give_back(self) -> None:
        """Let ``run`` begin no other part, finish those it has begun and return.

        Whoever runs the batch next goes on behind them.  A batch that is to end goes on to its end.
        """
        self._is_leaving = True

    async def give_up(self, reason: str) -> None:
        """End a batch on which ``run`` fails whatever is done; lines that have ended are kept.

        It is ``failed`` then, for this reason, or ``cancelled`` if that was asked for.  Raises what
        ``run`` raises.
        """
        await self._leased(lambda: self._give_up(reason))

    def close(self) -> None:
        """Forget the parts that are not in the store."""
        while self._parts:
            self._parts.popitem()[1].close()

    @property
    def progress(self) -> tuple[str, int]:
        """The state that the batch was in at last, and how many lines were in the store."""
        return self._state, self._counted.num_answered + self._counted.num_failed

    async def _leased(self, do: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        if not await self._lease.take():
            return False
        work = asyncio.create_task(do())
        hold = asyncio.create_task(self._lease.hold())
        try:
            await asyncio.wait({work, hold}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([work, hold])
        for task in (hold, work):
            if not task.cancelled():
                task.result()
        return True

    async def release(self) -> None:
        """Let another process go on at once."""
        await self._lease.release()

    async def _work(self) -> None:
        while (batch := await self._read()) is not None and not batch.state.is_terminal:
            match batch.state:
                case BatchState.VALIDATING:
                    await self._validate(batch)
                case BatchState.IN_PROGRESS | BatchState.CANCELLING:
                    if not await self._feed(batch):
                        _log.info("%s has given its place back", self._name.batch_id)
                        self._has_left = True
                        return
                    await self._conclude(batch)
                case _:
                    await self._finalize(batch, BatchState(batch.ending or BatchState.COMPLETED))

    async def _validate(self, batch: Batch) -> None:
        try:
            found = await asyncio.to_thread(self._survey, batch)
        except BlobNotFound:
            error = LineError("input_file_lost", "The content of the input file is gone.")
            found = Survey(errors=[error])
        crash_point("batch.after_survey")
        fields = ("n", found.total, "mo", found.model)
        if found.errors:
            errors = ("er", told_errors(found.errors))
            await self._lease.turn(BatchState.VALIDATING, BatchState.FAILED, *fields, *errors)
            return
        layout = "[" + ",".join(f"[{offset},{line}]" for offset, line in found.layout) + "]"
        ids = ("of", new_file_id(), "ef", new_file_id())
        await self._lease.turn(
            BatchState.VALIDATING, BatchState.IN_PROGRESS, *fields, *ids, "lay", layout
        )

    def _survey(self, batch: Batch) -> Survey:
        with self._tools.blobs.reader(self._input(batch)) as file:
            return survey(file, batch.endpoint)

    async def _feed(self, batch: Batch) -> bool:
        """Work off the parts that are not in the store; false if some are left for later."""
        settings = self._tools.settings
        await self._lease.look()
        jobs = LineJobs(
            self._tools.producer,
            self._tools.translator,
            self._lease,
            self._name,
            batch.endpoint,
            max_in_flight=settings.max_in_flight,
            model_seconds=settings.model_seconds,
        )
        done = await self._files.parts()
        self._counted = LineCounts(
            sum(part.num_answered for part in done), sum(part.num_failed for part in done)
        )
        written = {part.number for part in done}
        todo = [number for number in range(len(batch.layout)) if number not in written]
        feeders = [self._feed_parts(batch, jobs, todo) for _ in range(settings.max_parts)]
        closer = asyncio.create_task(self._close_when_ending())
        try:
            await run_together(feeders)
        finally:
            await end_tasks([closer])
        return not todo

    async def _feed_parts(self, batch: Batch, jobs: LineJobs, todo: list[int]) -> None:
        while todo and (self._lease.ending or not self._is_leaving):
            number = todo.pop(0)
            await self._feed_part(batch, jobs, number)

    async def _feed_part(self, batch: Batch, jobs: LineJobs, number: int) -> None:
        lines = await asyncio.to_thread(self._read_part, batch, number)
        part = self._parts[number] = Part(number)
        if self._lease.ending and number >= max(batch.cursor, self._lease.cursor):
            for line in lines:
                part.add(jobs.forgo(line))
        else:
            await self._lease.begin_part(number)
            crash_point("batch.after_begin")
            async with aclosing(jobs.run(lines)) as outcomes:
                async for told in outcomes:
                    part.add(told)
                    crash_point("batch.line")
        await self._write_part(part)

    async def _write_part(self, part: Part) -> None:
        await asyncio.to_thread(self._output.write_part, part)
        crash_point("batch.after_part")
        call = calls.part_batch(
            self._tools.keys,
            self._name.tenant,
            self._name.batch_id,
            owner=self._lease.owner,
            number=part.number,
            num_answered=part.num_answered,
            num_failed=part.num_failed,
            usage=part.usage,
        )
        if await self._tools.link.call(call) < 0:
            raise StaleFence(f"another process works on {self._name.batch_id}")
        crash_point("batch.after_count")
        self._counted.num_answered += part.num_answered
        self._counted.num_failed += part.num_failed
        del self._parts[part.number]
        part.close()

    async def _close_when_ending(self) -> None:
        await self._lease.is_ending.wait()
        _log.info("%s is to end: %s", self._name.batch_id, self._lease.ending)
        # What was submitted and has not ended ends now; nothing else gets in.
        while True:
            try:
                await self._tools.producer.cancel_batch(self._name.batch_id)
                return
            except BrokerUnavailable as error:
                # Unless it is done, the parts wait for jobs that nobody ends.
                _log.warning("%s ends later: %s", self._name.batch_id, error.one_line())

    async def _conclude(self, batch: Batch) -> None:
        match self._lease.ending:
            case "":
                await self._lease.turn(batch.state, BatchState.FINALIZING)
            case "expired":
                fields = ("why", BatchState.EXPIRED)
                await self._lease.turn(batch.state, BatchState.FINALIZING, *fields)
            case _:
                # It was asked for, perhaps while the last parts were written.
                await self._finalize(batch, BatchState.CANCELLED)

    async def _give_up(self, reason: str) -> None:
        if (batch := await self._read()) is None or batch.state.is_terminal:
            return
        is_cancelled = batch.state is BatchState.CANCELLING
        end = BatchState.CANCELLED if is_cancelled else BatchState.FAILED
        files: tuple[str, ...] = NO_FILES
        try:
            await self._tools.producer.cancel_batch(self._name.batch_id)
            await self._forgo_rest(batch, end)
            files = await self._files.make(batch)
        except Exception as error:
            if may_pass(error):
                raise
            # It must end, even if nothing can be made of what there is.
            _log.exception("%s ends without the files of its output", self._name.batch_id)
        errors = told_errors([LineError("batch_failed", reason)])
        await self._lease.turn(batch.state, end, *files, *(() if is_cancelled else ("er", errors)))
        if files != NO_FILES:
            await asyncio.to_thread(self._output.clear)

    async def _forgo_rest(self, batch: Batch, end: BatchState) -> None:
        """Write all parts that are not in the store, with the lines that have ended."""
        written = {part.number for part in await self._files.parts()}
        for number in range(len(batch.layout)):
            if number in written:
                continue
            part = self._parts.get(number) or Part(number)
            self._parts[number] = part
            for line in await asyncio.to_thread(self._read_part, batch, number):
                if line.number not in part.told:
                    part.add(forgone(self._name.batch_id, line, end))
            await self._write_part(part)

    async def _finalize(self, batch: Batch, end: BatchState) -> None:
        """Put the output together and end the batch."""
        was = BatchState.CANCELLING if end is BatchState.CANCELLED else BatchState.FINALIZING
        files = await self._files.make(await self._read() or batch)
        crash_point("batch.before_end")
        await self._lease.turn(was, end, *files)
        crash_point("batch.after_end")
        await asyncio.to_thread(self._output.clear)

    async def _read(self) -> Batch | None:
        key = self._tools.keys.batch_object(self._name.tenant, self._name.batch_id)
        [fields] = await self._tools.link.read(hashes([key]))
        batch = Batch.read(self._name.batch_id, fields)
        self._state = batch.state if batch else ""
        return batch

    def _read_part(self, batch: Batch, number: int) -> list[RequestLine]:
        with self._tools.blobs.reader(self._input(batch)) as file:
            return read_part(file, batch.endpoint, batch.layout, number)

    def _count(self) -> LineCounts:
        parts = self._parts.values()
        return LineCounts(
            self._counted.num_answered + sum(part.num_answered for part in parts),
            self._counted.num_failed + sum(part.num_failed for part in parts),
        )

    def _input(self, batch: Batch) -> str:
        return file_blob(self._tools.keys, self._name.tenant, batch.input_file_id)
