"""The token stream of one job: resumable, gap-free and duplicate-free over any reconnect."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from tidemill._follow import Chunk, TokenFollower
from tidemill._link import Link
from tidemill._listener import Listener, pass_on, wait_seconds
from tidemill._reads import naming
from tidemill._rescue import Rescue
from tidemill.protocol.errors import JobNotFound, ResultExpired
from tidemill.protocol.messages import JobEnd
from tidemill.result import failure_of


class TokenStream(Iterator[Chunk]):
    """Iterates over the chunks of one job's output, waiting for those to come.

    It ends after the job's last chunk; then ``end`` tells how.  Raises ``JobFailed`` or
    ``JobCancelled`` there if the job did not end well, ``JobNotFinished`` after ``timeout``
    seconds without a chunk, and ``BrokerUnavailable`` if the broker stays away; then a new stream
    may go on after ``position`` or the last chunk's ``event_id``.  To leave it early, close it or
    use it as a context manager.  Belongs to one thread.
    """

    def __init__(
        self,
        link: Link,
        job_id: str,
        *,
        after: str | int = 0,
        timeout: float | None = None,
        rescue: Rescue | None = None,
    ) -> None:
        self._link = link
        self._rescue = rescue
        self._follower = TokenFollower(job_id, after)
        self._listener = Listener(link.client)
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
        chunks = list(self._follower.ready)
        self._follower.ready.clear()
        if chunks:
            self._taken = chunks[-1].end
        return chunks

    def close(self) -> None:
        """Give the connection back; iterating on would open another one."""
        self._listener.close()

    def __next__(self) -> Chunk:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not self._follower.ready:
            if self._follower.end is not None:
                self._finish(self._follower.end)
            self._advance(deadline)
        chunk = self._follower.ready.popleft()
        self._taken = chunk.end
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _finish(self, end: JobEnd) -> None:
        self.close()
        if self._rescue is not None:
            self._rescue.note_end()
        raise failure_of(self.job_id, end) or StopIteration

    def _advance(self, deadline: float | None) -> None:
        follower = self._follower
        if follower.must_read:
            self._read(deadline)
            return
        self._listener.add(follower.channel)
        pass_on(self._listener.get(wait_seconds(self.job_id, deadline)), follower)

    def _read(self, deadline: float | None) -> None:
        follower = self._follower
        try:
            with naming(self.job_id):
                follower.take_reply(self._link.read(follower.next_read()))
        except ResultExpired:
            raise
        except JobNotFound:
            if self._rescue is None:
                raise
            self._rescue.bring_back(deadline)
            follower.start_over()
