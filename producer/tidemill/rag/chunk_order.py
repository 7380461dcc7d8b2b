"""One order for the chunks that many prompts retrieve; pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

from tidemill.protocol.errors import InvalidRequest

#: A retrieved passage: its text, or its token ids.
Chunk = str | tuple[int, ...]

ChunkT = TypeVar("ChunkT", bound=Chunk)


def canonical_order(
    jobs_chunks: Sequence[Sequence[ChunkT]], *, keep_first: int = 0
) -> list[list[ChunkT]]:
    """Return each job's chunks in an order under which jobs share long prefixes.

    A job's chunks are sorted by the number of jobs that hold them, most first, then by a hash of
    their content.  So the result depends neither on the order of the jobs nor on the order that
    their chunks came in; jobs with the same chunks become equal, and of two jobs alone all common
    chunks become a shared prefix.  Over many jobs it is a good order and not always the best one.

    The first ``keep_first`` chunks of each job, its most relevant ones, stay where they are; the
    others are then counted among the jobs that begin with the same ones, for no other job can
    share them.  Raises ``InvalidRequest``.
    """
    if isinstance(keep_first, bool) or not isinstance(keep_first, int) or keep_first < 0:
        raise InvalidRequest(
            f"keep_first: {keep_first!r:.40} is not a number of chunks", field="keep_first"
        )
    groups: dict[tuple[ChunkT, ...], list[int]] = defaultdict(list)
    for index, chunks in enumerate(jobs_chunks):
        groups[tuple(chunks[:keep_first])].append(index)
    ordered: dict[int, list[ChunkT]] = {}
    for head, members in groups.items():
        tails = _sorted_by_use([jobs_chunks[index][keep_first:] for index in members])
        for index, tail in zip(members, tails, strict=True):
            ordered[index] = [*head, *tail]
    return [ordered[index] for index in range(len(jobs_chunks))]


def _sorted_by_use(jobs_chunks: Sequence[Sequence[ChunkT]]) -> list[list[ChunkT]]:
    num_jobs = Counter(chunk for chunks in jobs_chunks for chunk in set(chunks))
    place = {chunk: (-count, _content_hash(chunk)) for chunk, count in num_jobs.items()}
    return [sorted(chunks, key=place.__getitem__) for chunks in jobs_chunks]


def _content_hash(chunk: Chunk) -> bytes:
    if isinstance(chunk, str):
        return sha256(chunk.encode("utf-8", "surrogatepass")).digest()
    return sha256(repr(chunk).encode()).digest()
