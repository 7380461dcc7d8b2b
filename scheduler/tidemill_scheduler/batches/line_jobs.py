"""Requests of a batch on the queue: each becomes one line, whatever dies meanwhile."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from tidemill._request import JobOptions, JobSpec
from tidemill.async_client import AsyncProducer
from tidemill.async_job import AsyncJob
from tidemill.batches.answers import answered, refused, unanswered
from tidemill.batches.lines import RequestLine
from tidemill.batches.translation import Translated, Translator
from tidemill.protocol.batches import NO_USAGE, BatchUsage
from tidemill.protocol.errors import (
    BatchClosed,
    BrokerError,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobNotFound,
    Overloaded,
    TidemillError,
    UnknownModel,
)
from tidemill.result import Result
from tidemill_scheduler.batches.lease import BatchLease, BatchName
from tidemill_scheduler.tasks import end_tasks

_log = logging.getLogger(__name__)

#: Lines that are submitted in one round trip.
_CHUNK = 32
_MODEL_PAUSE_SECONDS = 1.0
#: How often the jobs of a line are made again whose results were forgotten before they were read.
_MAX_REPEATS = 3
#: Batch work goes behind everything else unless a line says otherwise.
_PRIORITY = 1


@dataclass(frozen=True, slots=True)
class Told:
    """What became of the request of line ``number``: a line of the output.

    It is one of the error file if ``is_answer`` is false.
    """

    number: int
    data: bytes
    is_answer: bool
    usage: BatchUsage = NO_USAGE


@dataclass(slots=True)
class _Work:
    """A line that is worked on; ``jobs`` has an entry per spec, None where there is no job yet."""

    line: RequestLine
    translated: Translated
    jobs: list[AsyncJob | None]
    refusal: Exception | None = None
    num_repeats: int = 0

    def missing(self) -> list[int]:
        if self.refusal is not None:
            return []
        return [index for index, job in enumerate(self.jobs) if job is None]


class LineJobs:
    """Runs the requests of one batch.

    The keys of the jobs name batch and line, so that whoever runs a line again finds its jobs.
    Whatever goes wrong with one line is told in its place; only what would go wrong with any
    other one too, that the broker is away, is raised.
    """

    def __init__(
        self,
        producer: AsyncProducer,
        translator: Translator,
        lease: BatchLease,
        name: BatchName,
        endpoint: str,
        *,
        max_in_flight: int,
        model_seconds: float,
    ) -> None:
        self._producer, self._translator = producer, translator
        self._lease, self._name, self._endpoint = lease, name, endpoint
        self._max_in_flight = max_in_flight
        self._slots, self._gate = asyncio.Semaphore(max_in_flight), asyncio.Lock()
        self._models_until = time.monotonic() + model_seconds
        self._logged: set[type[Exception]] = set()

    async def run(self, lines: Sequence[RequestLine]) -> AsyncGenerator[Told, None]:
        """Yield a line for each request, as they end.  Raises ``BrokerError``."""
        told: asyncio.Queue[Told | Exception] = asyncio.Queue()
        feeder = asyncio.create_task(self._feed(lines, told))
        try:
            for _ in lines:
                item = await told.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            await end_tasks([feeder])

    def forgo(self, line: RequestLine) -> Told:
        """Return the line of a request for which nothing was submitted."""
        return forgone(self._name.batch_id, line, self._lease.ending)

    async def _feed(
        self, lines: Sequence[RequestLine], told: asyncio.Queue[Told | Exception]
    ) -> None:
        size = min(_CHUNK, self._max_in_flight)
        try:
            async with asyncio.TaskGroup() as waits:
                for start in range(0, len(lines), size):
                    chunk = lines[start : start + size]
                    await self._take_slots(len(chunk))
                    works = [await self._translate(line) for line in chunk]
                    await self._submit(works)
                    for work in works:
                        waits.create_task(self._finish(work, told))
        except ExceptionGroup as error:
            told.put_nowait(error.exceptions[0])

    async def _take_slots(self, num: int) -> None:
        # One part at a time: parts that hold some each and wait for more would wait for ever.
        async with self._gate:
            for _ in range(num):
                await self._slots.acquire()

    async def _finish(self, work: _Work, told: asyncio.Queue[Told | Exception]) -> None:
        try:
            told.put_nowait(await self._outcome(work))
        finally:
            self._slots.release()

    async def _translate(self, line: RequestLine) -> _Work:
        while True:
            try:
                translated = await self._translator.translate(self._endpoint, line.body)
            except BrokerError:
                raise
            except UnknownModel as error:
                if not self._may_wait_for_model():
                    return _Work(line, _NOTHING, [], error)
                await self._pause(_MODEL_PAUSE_SECONDS)
            except TidemillError as error:
                return _Work(line, _NOTHING, [], error)
            except Exception as error:
                return _Work(line, _NOTHING, [], self._unexpected(line, error))
            else:
                return _Work(line, translated, [None] * len(translated.specs))

    async def _submit(self, works: Sequence[_Work]) -> None:
        """Give every line its jobs, or the reason why it has none."""
        while todo := [(work, index) for work in works for index in work.missing()]:
            try:
                specs = [self._spec(work, index) for work, index in todo]
                outcomes = await self._producer.submit_many(specs)
            except BrokerError:
                raise
            except Exception as error:
                await self._isolate(works, error)
                return
            waits = [
                self._take(work, index, outcome)
                for (work, index), outcome in zip(todo, outcomes, strict=True)
            ]
            if pause := max(waits):
                await self._pause(pause)

    async def _isolate(self, works: Sequence[_Work], error: Exception) -> None:
        """Submit lines one by one, of which one cannot be submitted; the others do not suffer."""
        if len(works) > 1:
            for work in works:
                await self._submit([work])
        else:
            [work] = works
            is_ours = isinstance(error, TidemillError)
            work.refusal = error if is_ours else self._unexpected(work.line, error)

    def _take(self, work: _Work, index: int, outcome: AsyncJob | TidemillError) -> float:
        """Note what became of a submission; returns for how long to wait before the next."""
        match outcome:
            case AsyncJob():
                work.jobs[index] = outcome
            case IdempotencyConflict() if outcome.job_id:
                # An older version of this program meant another job by the same line.
                work.jobs[index] = self._producer.job(outcome.job_id)
            case Overloaded():
                if not self._lease.ending:
                    return outcome.retry_after_seconds
                work.refusal = outcome
            case UnknownModel() if self._may_wait_for_model():
                return _MODEL_PAUSE_SECONDS
            case BrokerError():
                raise outcome
            case TidemillError():
                work.refusal = _named(outcome, work.translated.prompt_field)
        return 0.0

    def _spec(self, work: _Work, index: int) -> JobSpec:
        key = f"{self._name.batch_id}:{work.line.number}" + (f":{index}" if index else "")
        spec = work.translated.specs[index]
        forced: JobOptions = {"idempotency_key": key, "batch": self._name.batch_id, "stream": False}
        return spec.with_options(forced).with_defaults({"priority": _PRIORITY})

    async def _outcome(self, work: _Work) -> Told:
        while True:
            if work.refusal is not None:
                return self._refused(work, work.refusal)
            try:
                results = [await _job(work, index).result() for index in range(len(work.jobs))]
            except BrokerError:
                raise
            except JobNotFound as error:
                # Its result made room for others before it was read: the job is run again.
                work.num_repeats += 1
                if work.num_repeats > _MAX_REPEATS:
                    return self._refused(work, error)
                work.jobs = [None] * len(work.jobs)
                await self._submit([work])
            except TidemillError as error:
                return self._refused(work, error)
            except Exception as error:
                return self._refused(work, self._unexpected(work.line, error))
            else:
                return self._answered(work, results)

    def _answered(self, work: _Work, results: Sequence[Result]) -> Told:
        job_id = results[0].job_id if results else ""
        try:
            body = work.translated.answer(results)
            data = answered(self._name.batch_id, work.line, job_id, body)
        except TidemillError as error:
            return self._refused(work, error)
        except Exception as error:
            return self._refused(work, self._unexpected(work.line, error))
        usage = NO_USAGE
        for result in results:
            used = result.usage
            usage += BatchUsage(used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        return Told(work.line.number, data, True, usage)

    def _refused(self, work: _Work, error: Exception) -> Told:
        if self._lease.ending and isinstance(error, BatchClosed | JobCancelled | Overloaded):
            return self.forgo(work.line)
        return Told(work.line.number, refused(self._name.batch_id, work.line, error), False)

    def _unexpected(self, line: RequestLine, error: Exception) -> Exception:
        """Tell the log of a fault of this program; returns it, to be told in the line's place."""
        where = f"{self._name.batch_id}: line {line.number}"
        if type(error) in self._logged:
            _log.error("%s: %s, as before", where, type(error).__name__)
        else:
            self._logged.add(type(error))
            _log.error("%s: unexpected error", where, exc_info=error)
        return error

    def _may_wait_for_model(self) -> bool:
        return not self._lease.ending and time.monotonic() < self._models_until

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._lease.is_ending.wait(), seconds)
        except TimeoutError:
            return  # the pause is over, which is what was waited for


def forgone(batch_id: str, line: RequestLine, ending: str) -> Told:
    """Return the line of a request that will not be answered: its batch has ended before."""
    return Told(line.number, unanswered(batch_id, line, ending), False)


def _named(error: TidemillError, prompt_field: str) -> TidemillError:
    """Name the prompt as the request does, which knows nothing of its token ids."""
    if isinstance(error, InvalidRequest) and error.field == "prompt_ids":
        message = error.message.replace("prompt_ids", prompt_field, 1)
        return InvalidRequest(message, field=prompt_field, fix=error.fix)
    return error


_NOTHING = Translated((), lambda results: {})


def _job(work: _Work, index: int) -> AsyncJob:
    job = work.jobs[index]
    assert job is not None, "a line without refusal has all its jobs"
    return job
