"""One face for both clients, so that every test of the SDK runs against each of them."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tidemill import (
    AsyncBestOf,
    AsyncJob,
    AsyncProducer,
    AsyncTokenStream,
    AsyncWatch,
    CancelCounts,
    Chunk,
    JobEnd,
    JobPage,
    JobState,
    JobStatus,
    ModelCard,
    Producer,
    Result,
    Status,
    Transcription,
)
from tidemill.service.tokenizer import Tokenizer

T = TypeVar("T")


class Stream(Protocol):
    """What both kinds of token stream are for a test."""

    @property
    def position(self) -> int: ...

    @property
    def end(self) -> JobEnd | None: ...

    def __iter__(self) -> Iterator[Chunk]: ...

    def __next__(self) -> Chunk: ...

    def close(self) -> object: ...


class Twin(Protocol):
    """What both kinds of producer are for a test."""

    def submit(self, prompt: Any, **options: Any) -> Any: ...

    def submit_many(self, items: Any, **options: Any) -> list[Any]: ...

    def submit_best_of(self, prompt: Any, **options: Any) -> Any: ...

    def job(self, job_id: str) -> Any: ...

    def stream(self, job_id: str, **options: Any) -> Stream: ...

    def result(self, job_id: str, timeout: float | None = None) -> Result: ...

    def cancel(self, job_id: str) -> JobState: ...

    def map(self, items: Any, **options: Any) -> Iterator[Any]: ...

    def transcribe(self, audio: Any, **options: Any) -> Transcription: ...

    def cancel_batch(self, name: str) -> CancelCounts: ...

    def cancel_tenant(self) -> CancelCounts: ...

    def batch(self, name: str | None = None, **options: Any) -> Any: ...

    def generate(self, prompt: Any, **options: Any) -> Result: ...

    def job_status(self, job_id: str) -> JobStatus: ...

    def job_page(self, **options: Any) -> JobPage: ...

    def jobs(self, **options: Any) -> Iterator[JobStatus]: ...

    def status(self) -> Status: ...

    def models(self) -> tuple[ModelCard, ...]: ...

    def tokenizer(self, model: str | None = None) -> Tokenizer: ...

    def close(self) -> object: ...


class LoopThread:
    """An event loop on a thread of its own; runs coroutines for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        """End the loop; fails if a task is still there."""
        left = self.run(self._leftovers())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not left, left

    async def _leftovers(self) -> list[str]:
        await self._loop.shutdown_asyncgens()
        me = asyncio.current_task()
        return [str(task) for task in asyncio.all_tasks() if task is not me]


class AsyncTwin:
    """An ``AsyncProducer`` driven from a test's thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._thread = LoopThread()
        try:
            self.producer = self._thread.run(self._make(*args, **options))
        except BaseException:
            self._thread.close()
            raise

    async def _make(self, *args: Any, **options: Any) -> AsyncProducer:
        return AsyncProducer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.producer, name)
        return lambda *args, **options: self._thread.run(method(*args, **options))

    def submit(self, prompt: Any, **options: Any) -> "_JobTwin":
        return self._handle(self._thread.run(self.producer.submit(prompt, **options)))

    def submit_many(self, items: Any, **options: Any) -> list[Any]:
        jobs = self._thread.run(self.producer.submit_many(items, **options))
        return [self._handle(job) if isinstance(job, AsyncJob) else job for job in jobs]

    def submit_best_of(self, prompt: Any, **options: Any) -> "_HandleTwin":
        best: AsyncBestOf = self._thread.run(self.producer.submit_best_of(prompt, **options))
        return _HandleTwin(self._thread, best)

    def job(self, job_id: str) -> "_JobTwin":
        return self._handle(self.producer.job(job_id))

    def _handle(self, job: AsyncJob) -> "_JobTwin":
        return _JobTwin(self._thread, job)

    def stream(self, job_id: str, **options: Any) -> "_StreamTwin":
        return _StreamTwin(self._thread, self.producer.stream(job_id, **options))

    def map(self, items: Any, **options: Any) -> Iterator[Any]:
        return self._iterate(self.producer.map(items, **options))

    def jobs(self, **options: Any) -> Iterator[JobStatus]:
        return self._iterate(self.producer.jobs(**options))

    def _iterate(self, results: Any) -> Iterator[Any]:
        try:
            while True:
                yield self._thread.run(anext(results))
        except StopAsyncIteration:
            return
        finally:
            self._thread.run(results.aclose())

    def batch(self, name: str | None = None, **options: Any) -> "_BatchTwin":
        return _BatchTwin(self._thread, self.producer.batch(name, **options))

    def close(self) -> None:
        self._thread.run(self.producer.close())
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _HandleTwin:
    def __init__(self, thread: LoopThread, handle: Any) -> None:
        self._thread = thread
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._handle, name)
        if not callable(value):
            return value
        return lambda *args, **options: self._thread.run(self._call(value, args, options))

    async def _call(self, method: Any, args: Any, options: Any) -> Any:
        told = method(*args, **options)
        return await told if inspect.isawaitable(told) else told


class _JobTwin(_HandleTwin):
    def stream(self, **options: Any) -> "_StreamTwin":
        return _StreamTwin(self._thread, self._handle.stream(**options))

    def watch(self, **options: Any) -> "_HandleTwin":
        return _HandleTwin(self._thread, self._thread.run(self._begin_watch(options)))

    async def _begin_watch(self, options: dict[str, Any]) -> AsyncWatch:
        watch: AsyncWatch = self._handle.watch(**options)
        return watch


class _BatchTwin(_HandleTwin):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name != "jobs":
            return value
        return [_JobTwin(self._thread, job) if isinstance(job, AsyncJob) else job for job in value]

    def __enter__(self) -> Self:
        self._thread.run(self._handle.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.run(self._handle.__aexit__(kind, error, traceback))


class _StreamTwin:
    def __init__(self, thread: LoopThread, stream: AsyncTokenStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def position(self) -> int:
        return self._stream.position

    @property
    def end(self) -> JobEnd | None:
        return self._stream.end

    def close(self) -> None:
        self._thread.run(self._stream.close())

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._thread.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


MakeTwin = Callable[..., Twin]
TWINS: dict[str, Any] = {"sync": Producer, "async": AsyncTwin}
