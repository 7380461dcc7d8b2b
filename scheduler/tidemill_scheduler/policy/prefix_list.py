"""Waiting jobs in the depth-first order of the radix tree over their prompts.

Routing keys are chained hashes, so the lexicographic order of the keys is that depth-first order:
one sorted list stands for the trie, and what two neighbours share is a binary search.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.prefix_chunk import Chunk, rank_of
from tidemill_scheduler.policy.routing_hashes import share_depth, shared_depth

#: A chunk is split above twice this size, and small ones are joined up to it.
CHUNK_SIZE = 512
_SMALL_CHUNK = CHUNK_SIZE // 4

#: Where an entry is: number of its chunk, offset in it.  Good until the list changes.
Place = tuple[int, int]


class PrefixList:
    """Jobs sorted by routing key, entry number and job id, each with its *depth* and its *work*.

    The depth is the number of leading hashes a job shares with what is computed before it: with
    the entry before it, or with one that was served from there.  The work is what is left of its
    prompt then, at least one token.  A prompt is taken to have the tokens its key stands for, if
    its stated cost is less.  So to take an entry out never makes the work of all grow, and to put
    one in makes it grow by the work of that entry at most.
    """

    def __init__(self, tokens_per_hash: int) -> None:
        self._tokens_per_hash = tokens_per_hash
        self._jobs: dict[str, WaitingJob] = {}
        self._chunks: list[Chunk] = []
        # The last key of each chunk.
        self._lasts: list[bytes] = []
        #: The work of all entries, in tokens.
        self.work = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[WaitingJob]:
        for chunk in self._chunks:
            yield from chunk.jobs

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks in order, none of them empty; to be read only."""
        return self._chunks

    def work_of(self, job: WaitingJob, depth: int) -> int:
        """Return the tokens of a job that are left if the first ``depth`` hashes are computed."""
        per_hash, hint_depth = self._tokens_per_hash, job.hint_depth
        tokens = (len(job.key) // ROUTING_HASH_BYTES - hint_depth) * per_hash
        if job.cost > tokens:
            tokens = job.cost
        if depth > hint_depth:
            tokens -= (depth - hint_depth) * per_hash
        return tokens if tokens > 1 else 1

    def place_of(self, job: WaitingJob) -> Place:
        """Return where the job is or would be; behind all others that is (number of chunks, 0)."""
        key = job.key
        index = bisect_left(self._lasts, key)
        if index < len(self._lasts) and self._lasts[index] == key:
            high = bisect_right(self._lasts, key, index)
            # One key may fill many chunks.
            if high > index + 1 or self._chunks[index].jobs[-1] is not job:
                index = bisect_left(
                    self._chunks, rank_of(job), index, high, key=lambda c: rank_of(c.jobs[-1])
                )
        if index == len(self._lasts):
            return (index, 0)
        return (index, self._chunks[index].offset_of(job))

    def place_of_prefix(self, prefix: bytes) -> Place:
        """Return the place of the first key that is ``prefix`` or sorts behind it."""
        index = bisect_left(self._lasts, prefix)
        if index == len(self._lasts):
            return (index, 0)
        return (index, bisect_left(self._chunks[index].keys, prefix))

    def job_at(self, place: Place) -> WaitingJob | None:
        """Return the job at a place, none at the end."""
        index, offset = place
        return self._chunks[index].jobs[offset] if index < len(self._chunks) else None

    def depth_at(self, place: Place, key: bytes) -> int:
        """Return how many hashes ``key`` shares with the entry before a place."""
        index, offset = place
        # Mostly it is as much as the entries on both sides share.
        guess = self._chunks[index].depths[offset] if index < len(self._chunks) else 0
        if offset:
            return shared_depth(self._chunks[index].keys[offset - 1], key, guess)
        return shared_depth(self._lasts[index - 1], key, guess) if index else 0

    def add(self, job: WaitingJob) -> None:
        """Let a job wait; raises ``ValueError`` if it does already."""
        place = self.place_of(job)
        self.insert(place, job, self.depth_at(place, job.key))

    def insert(self, place: Place, job: WaitingJob, depth: int) -> None:
        """Let a job wait at its place, sharing ``depth`` hashes with what is computed before it.

        Raises ``ValueError`` if it waits already.
        """
        if job.job_id in self._jobs:
            raise ValueError(f"job {job.job_id} waits already; remove it before adding it again")
        self._jobs[job.job_id] = job
        self._meet(place, job, depth)
        work = self.work_of(job, depth)
        self.work += work
        index, offset = place
        if index == len(self._chunks):
            index, offset = self._end()
        self._chunks[index].insert(offset, job, depth, work)
        self._after_growth(index)

    def remove(self, job_id: str) -> WaitingJob:
        """Take a job out that nobody computes; raises ``KeyError``."""
        job = self._jobs.pop(job_id)
        place = self.place_of(job)
        self._part(place, job.key)
        self._delete(place)
        return job

    def serve(self, job: WaitingJob) -> WaitingJob | None:
        """Take a job out that is computed now and return the entry that came behind it.

        That one keeps what it shares with the job.  Raises ``KeyError``.
        """
        del self._jobs[job.job_id]
        index, offset = place = self.place_of(job)
        follower = self.job_at(self._behind(index, offset))
        self._delete(place)
        return follower

    def count_prefix(self, place: Place, prefix: bytes, limit: int) -> int:
        """Return how many keys from ``place`` on begin with ``prefix``; stops beyond ``limit``."""
        index, offset = place
        count = 0
        end = _successor(prefix)
        while index < len(self._chunks) and count < limit:
            keys = self._chunks[index].keys
            stop = len(keys) if end is None else bisect_left(keys, end, offset)
            count += stop - offset
            if stop < len(keys):
                break
            index, offset = index + 1, 0
        return min(count, limit)

    def _behind(self, index: int, offset: int) -> Place:
        if offset + 1 < len(self._chunks[index].keys):
            return (index, offset + 1)
        return (index + 1, 0)

    def _end(self) -> Place:
        if not self._chunks:
            self._chunks.append(Chunk())
            self._lasts.append(b"")
        return (len(self._chunks) - 1, len(self._chunks[-1]))

    def _meet(self, place: Place, job: WaitingJob, depth: int) -> None:
        index, offset = place
        if index == len(self._chunks):
            return
        chunk = self._chunks[index]
        known = chunk.depths[offset]
        # Of three neighbours the outer two share the lesser of what the pairs share, so a job that
        # shares more with its predecessor than the two did has no more for its successor.
        if depth <= known and share_depth(job.key, chunk.keys[offset], known + 1):
            self._set_depth(chunk, offset, shared_depth(job.key, chunk.keys[offset], known + 1))

    def _part(self, place: Place, key: bytes) -> None:
        index, offset = place
        depth = self._chunks[index].depths[offset]
        index, offset = self._behind(index, offset)
        if index == len(self._chunks):
            return
        chunk = self._chunks[index]
        known = chunk.depths[offset]
        # What a successor shares with a job served earlier does not go with this one.
        if depth < known and share_depth(key, chunk.keys[offset], known):
            self._set_depth(chunk, offset, depth)

    def _set_depth(self, chunk: Chunk, offset: int, depth: int) -> None:
        before = chunk.work
        chunk.update(offset, depth, self.work_of(chunk.jobs[offset], depth))
        self.work += chunk.work - before

    def _after_growth(self, index: int) -> None:
        chunk = self._chunks[index]
        if len(chunk.keys) > 2 * CHUNK_SIZE:
            self._chunks.insert(index + 1, chunk.split(CHUNK_SIZE))
            self._lasts.insert(index + 1, self._lasts[index])
            self._lasts[index] = chunk.keys[-1]
            index += 1
        self._lasts[index] = self._chunks[index].keys[-1]

    def _delete(self, place: Place) -> None:
        index, offset = place
        chunk = self._chunks[index]
        self.work -= chunk.works[offset]
        chunk.delete(offset)
        if not chunk.keys:
            del self._chunks[index], self._lasts[index]
            return
        if offset == len(chunk.keys):
            self._lasts[index] = chunk.keys[-1]
        if len(chunk.keys) < _SMALL_CHUNK:
            self._join_small(max(0, index - 1))
            self._join_small(index)

    def _join_small(self, index: int) -> None:
        pair = self._chunks[index : index + 2]
        if len(pair) == 2 and len(pair[0]) + len(pair[1]) <= CHUNK_SIZE:
            pair[0].absorb(pair[1])
            self._lasts[index] = self._lasts[index + 1]
            del self._chunks[index + 1], self._lasts[index + 1]


def _successor(prefix: bytes) -> bytes | None:
    """The least key above all that begin with ``prefix``; none if there is no such key."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None
