"""The asynchronous twin of ``tidemill.stream``."""

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from tidemill._async_driver import AsyncDriver
from tidemill._async_link import AsyncLink
from tidemill._async_rescue import AsyncRescue
from tidemill._follow import Chunk, TokenFollower
from tidemill.protocol.messages import JobEnd
from tidemill.result import failure_of


class AsyncTokenStream(AsyncIterator[Chunk]):
    """Iterates over the chunks of one job's output; ends, raises and resumes as its twin does.

    All streams of a shard share one connection.  To leave one early, close it or use it as a
    context manager.  Belongs to one task.
    """

    def __init__(
        self,
        link: AsyncLink,
        job_id: str,
        *,
        after: str | int = 0,
        timeout: float | None = None,
        rescue: AsyncRescue | None = None,
        is_fresh: bool = False,
    ) -> None:
        self._follower = TokenFollower(job_id, after, is_fresh=is_fresh)
        self._driver = AsyncDriver(link, self._follower, rescue)
        self._rescue = rescue
        self._timeout = timeout
        self._taken = self._follower.position

    @property
    def job_id(self) -> str:
        """The job whose tokens these are."""
        return self._follower.job_id

    @property
    def position(self) -> int:
        """Number of tokens up to the end of the last chunk taken."""
        return self._taken

    @property
    def end(self) -> JobEnd | None:
        """How the job ended; None before the stream's end."""
        return None if self._follower.ready else self._follower.end

    def take_ready(self) -> list[Chunk]:
        """Take the chunks that are here already, without waiting for more."""
        self._driver.take_arrived()
        chunks = list(self._follower.ready)
        self._follower.ready.clear()
        if chunks:
            self._taken = chunks[-1].end
        return chunks

    async def close(self) -> None:
        """Stop listening; iterating on would start it again."""
        self._driver.close()

    async def __anext__(self) -> Chunk:
        try:
            await self._fill()
        except BaseException:
            # Whoever is told of an end, an error or a cancellation seldom closes what failed.
            self._driver.close()
            raise
        chunk = self._follower.ready.popleft()
        self._taken = chunk.end
        return chunk

    async def _fill(self) -> None:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not self._follower.ready:
            if self._follower.end is not None:
                if self._rescue is not None:
                    self._rescue.note_end()
                raise failure_of(self.job_id, self._follower.end) or StopAsyncIteration
            await self._driver.advance(deadline)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
