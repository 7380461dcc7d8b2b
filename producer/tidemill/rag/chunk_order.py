"""One order for the chunks that many prompts retrieve; pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from typing import TypeVar

from tidemill.rag._checks import check_count, check_jobs

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
    share them.  Raises ``InvalidRequest``, which names the place, for what is not a list of lists
    of chunks; a text in the place of a list of chunks is refused and not cut into letters.
    """
    check_count(keep_first, "keep_first", "chunks", least=0)
    check_jobs(jobs_chunks)
    # Each chunk is known by a number from here on, for a hash of token ids is not kept by Python.
    number_of: defaultdict[ChunkT, int] = defaultdict()
    number_of.default_factory = number_of.__len__
    jobs = [list(map(number_of.__getitem__, chunks)) for chunks in jobs_chunks]
    distinct = list(number_of)
    _order(jobs, list(map(_content_hash, distinct)), keep_first)
    return [list(map(distinct.__getitem__, numbers)) for numbers in jobs]


def _order(jobs: Sequence[list[int]], hashes: Sequence[bytes], keep_first: int) -> None:
    """Sort what follows the kept chunks of each job in place; a chunk is an index of ``hashes``."""
    groups: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for numbers in jobs:
        groups[tuple(numbers[:keep_first])].append(numbers)
    for members in groups.values():
        tails = [numbers[keep_first:] for numbers in members]
        # Two stable sorts by keys that exist already, and none by pairs to be made for each chunk.
        for tail in tails:
            tail.sort(key=hashes.__getitem__)
        # A job alone holds each of its chunks as often as any other.
        if len(tails) > 1:
            num_jobs = Counter(chain.from_iterable(map(set, tails)))
            for tail in tails:
                tail.sort(key=num_jobs.__getitem__, reverse=True)
        for numbers, tail in zip(members, tails, strict=True):
            numbers[keep_first:] = tail


def _content_hash(chunk: Chunk) -> bytes:
    if isinstance(chunk, str):
        return sha256(chunk.encode("utf-8", "surrogatepass")).digest()
    # One byte more, or ids and a text that reads like them would be equal.  ``tuple`` since a named
    # tuple is equal to a plain one and is written differently.
    return sha256(repr(tuple(chunk)).encode()).digest() + b"\0"
