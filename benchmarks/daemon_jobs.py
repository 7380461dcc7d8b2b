"""Waiting jobs for benchmarks of the daemon: documents with several questions each, shuffled."""

import random
from collections.abc import Iterator

from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE, ROUTING_HASH_BYTES, ROUTING_STRIDE
from tidemill_scheduler.intake.jobs import WaitingJob, parse_pointer

TOKENS_PER_HASH = ROUTING_STRIDE * DEFAULT_BLOCK_SIZE

#: Jobs that share a document, and the share of a key that is the document's.
JOBS_PER_DOCUMENT = 10
_DOCUMENT_SHARE = 0.6


class JobSource:
    """An endless source of jobs with keys of ``num_hashes``, the same for the same seed.

    About ``JOBS_PER_DOCUMENT`` of each ``num_jobs`` in a row share the larger part of their key.
    """

    def __init__(self, num_jobs: int, num_hashes: int, seed: int = 1) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        depth = int(num_hashes * _DOCUMENT_SHARE)
        self._rest = num_hashes - depth
        self._documents = [
            self._random.randbytes(depth * ROUTING_HASH_BYTES)
            for _ in range(max(1, num_jobs // JOBS_PER_DOCUMENT))
        ]
        self._cost = str(num_hashes * TOKENS_PER_HASH + 7).encode()
        self._number = 0

    def take(self, count: int) -> list[WaitingJob]:
        """Return so many new jobs, read from pointers as the daemon reads them."""
        return list(self.jobs(count))

    def jobs(self, count: int) -> Iterator[WaitingJob]:
        """Make so many new jobs one by one."""
        for _ in range(count):
            self._number += 1
            document = self._random.choice(self._documents)
            fields = {
                b"j": f"job_00{self._seed:02}{self._number:024}".encode(),
                b"m": b"model",
                b"h": document + self._random.randbytes(self._rest * ROUTING_HASH_BYTES),
                b"c": self._cost,
                b"a": b"0",
                b"p": b"1",
            }
            yield parse_pointer("00", "p2:tenant", f"1700000000000-{self._number}", fields)
