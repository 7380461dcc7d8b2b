"""Waiting for a job's result: the same game as following its log, without the chunks."""

from tidemill._reads import SEAL, LogPage, Outcome, Read, log_page, outcome
from tidemill.protocol.codec import decode
from tidemill.protocol.keys import ShardKeys, keys_of
from tidemill.protocol.messages import JobEnd, TokenChunk
from tidemill.result import Result, from_log, from_stored, not_found, result_expired

_SEAL_PREFIX = f"{SEAL}-".encode()


class ResultFollower:
    """Waits for one job's end; does no I/O, and is driven like a ``TokenFollower``.

    ``is_fresh`` says that the job was just submitted, so that a first look would be in vain.
    """

    def __init__(self, job_id: str, *, is_fresh: bool = False) -> None:
        self.job_id = job_id
        self.keys: ShardKeys = keys_of(job_id)
        self.must_read = not is_fresh
        self.result: Result | None = None
        self._reads_log = False
        self._cursor = ""
        self._chunks: list[TokenChunk] = []

    def start_over(self) -> None:
        """Read the job anew, which the server had lost."""
        self._reads_log, self._cursor, self.must_read = False, "", True
        self._chunks.clear()

    @property
    def channel(self) -> str:
        """The channel on which the end is announced."""
        return self.keys.token_channel(self.job_id)

    @property
    def is_done(self) -> bool:
        """Whether ``result`` is there."""
        return self.result is not None

    def take_message(self, data: bytes) -> None:
        """Take one message of the channel; only that of the terminal entry matters."""
        self.must_read = self.must_read or data.startswith(_SEAL_PREFIX)

    def next_read(self) -> Read[LogPage | Outcome]:
        """What to read now."""
        if self._reads_log:
            return log_page(self.keys, self.job_id, self._cursor)
        return outcome(self.keys, self.job_id)

    def take_reply(self, reply: Outcome | LogPage) -> None:
        """Take the reply to ``next_read()``; raises ``JobNotFound`` or ``ResultExpired``."""
        if isinstance(reply, Outcome):
            self._take_outcome(reply)
        else:
            self._take_page(reply)

    def _take_outcome(self, found: Outcome) -> None:
        if found.state is None:
            raise not_found(self.job_id)
        self.must_read = False
        if found.result is not None:
            self.result = from_stored(self.job_id, found.result)
        elif found.state.is_terminal:
            # It ended without its worker: all there is of its output is in the log.
            self._reads_log = self.must_read = True

    def _take_page(self, page: LogPage) -> None:
        for entry_id, fields in page.entries:
            self._cursor = entry_id
            if b"d" in fields:
                self._chunks.append(decode(fields[b"d"], TokenChunk))
            if b"e" in fields:
                end = decode(fields[b"e"], JobEnd)
                self.result = from_log(self.job_id, end, self._chunks)
                self.must_read = False
                return
        if page.is_last:
            raise result_expired(self.job_id)
