"""Which worker's prefix cache holds, or is about to hold, which prefixes."""

from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from itertools import islice

from tidemill.protocol.messages import KvEvents
from tidemill_scheduler.policy.holder_index import HolderIndex, bits_from
from tidemill_scheduler.policy.in_flight import InFlight
from tidemill_scheduler.policy.routing_hashes import depth_within, group_depth, hash_at, split_key
from tidemill_scheduler.policy.worker_cache import WorkerCache

#: Workers that ``Residency.holders`` names at most.
MAX_HOLDERS = 8


class Residency:
    """The prefix caches of a model's workers, told by their events, and a shadow of what is sent.

    All keys are ``WaitingJob.kv_key``: hashes that stand for ``tokens_per_hash`` tokens each.
    Caches are prefix-closed, since tails leave before what they hang on.  A prefix is *cold* where
    nobody has it, *warming* where only jobs on their way bring it, *warm* where a cache holds it.
    A wrong answer costs a prefill, never correctness.
    """

    def __init__(self, tokens_per_hash: int) -> None:
        self.tokens_per_hash = tokens_per_hash
        #: Hashes from which on a shared prefix makes a group.
        self.group_depth = group_depth(tokens_per_hash)
        self._caches: dict[str, WorkerCache] = {}
        self._resident = HolderIndex()
        self._in_flight = InFlight()
        self._ids: list[str] = []
        self._free_slots: list[int] = []

    def add_worker(self, worker_id: str, capacity_hashes: int) -> None:
        """Follow a worker, with nothing in its cache, which has room for ``capacity_hashes``."""
        self.remove_worker(worker_id)
        # The lowest number, so that the sets stay small.
        slot = heappop(self._free_slots) if self._free_slots else len(self._ids)
        self._ids[slot : slot + 1] = [worker_id]
        self._caches[worker_id] = WorkerCache(slot, capacity_hashes)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker, if it is known, and what it holds, in time proportional to that."""
        cache = self._caches.pop(worker_id, None)
        if cache is None:
            return
        self._resident.discard(cache.resident, cache.bit)
        for key in cache.in_flight:
            self._in_flight.remove(key, cache.slot)
        heappush(self._free_slots, cache.slot)

    def apply(self, worker_id: str, events: KvEvents) -> bool:
        """Follow a batch of a worker's events; raises ``KeyError`` for an unknown worker.

        Returns False, and changes nothing, where batches before it are missing: only a snapshot
        helps then.  A batch that is known already is ignored.
        """
        cache = self._caches[worker_id]
        if events.seq > cache.seq + 1:
            return False
        if events.seq == cache.seq + 1:
            self._see(cache)
            if events.stored:
                self._store(cache, split_key(events.stored))
            if events.evicted:
                self._evict(cache, split_key(events.evicted))
            cache.seq = events.seq
        return True

    def reset(self, worker_id: str, seq: int, digests: bytes) -> None:
        """Take a snapshot for what a worker holds after its batch ``seq``; raises ``KeyError``."""
        cache = self._caches[worker_id]
        self._see(cache)
        held = split_key(digests)
        self._evict(cache, cache.resident.difference(held))
        self._store(cache, held)
        cache.seq = seq

    def dispatched(self, worker_id: str, key: bytes) -> None:
        """Count a job that is sent to a worker, until it arrives there or is forgotten."""
        cache = self._caches[worker_id]
        cache.expect(key)
        self._in_flight.add(key, cache.slot)

    def arrived(self, worker_id: str, key: bytes) -> None:
        """Note that a job that was sent shows in the worker's own account from now on.

        A worker that sends no events is believed to hold the job's prefixes.
        """
        cache = self._caches.get(worker_id)
        if cache is not None and cache.is_blind:
            digests = split_key(key)
            self._store(cache, digests)
            self._evict(cache, cache.guess(digests))
        self.forget(worker_id, key)

    def forget(self, worker_id: str, key: bytes) -> None:
        """Note that a job that was sent will leave nothing in the worker's cache."""
        cache = self._caches.get(worker_id)
        if cache is not None and cache.settle(key):
            self._in_flight.remove(key, cache.slot)

    def depth(self, worker_id: str, key: bytes, near: int | None = None) -> int:
        """Return how many leading hashes of ``key`` the worker holds or is about to.

        ``near`` is a guess that saves look-ups where it is right.  Raises ``KeyError``.
        """
        return self._caches[worker_id].depth(key, near)

    def holders(self, key: bytes, least_depth: int) -> list[tuple[str, int]]:
        """Return up to ``MAX_HOLDERS`` workers with at least so many leading hashes of ``key``.

        Each with its depth, the deepest first.  Which of many equally deep ones depends on the
        key, so that different prompts with a common beginning do not all see the same few.
        """
        least_depth = max(1, least_depth)
        depths = self._resident_holders(key, least_depth)
        for slot, depth in self._in_flight.depths(key, least_depth, MAX_HOLDERS).items():
            depths[slot] = max(depth, depths.get(slot, 0))
        best = sorted(depths.items(), key=lambda item: -item[1])[:MAX_HOLDERS]
        return [(self._ids[slot], depth) for slot, depth in best]

    def warming(self, key: bytes, depth: int) -> str | None:
        """Return a worker to which jobs bring the first ``depth`` hashes of ``key``.

        None if a cache holds them already, or nobody is about to.
        """
        digest = hash_at(key, depth)
        if digest in self._resident.bits:
            return None
        slot = self._in_flight.first_with(key, depth)
        return None if slot is None else self._ids[slot]

    def _resident_holders(self, key: bytes, least_depth: int) -> dict[int, int]:
        """Depths by slot of those whose caches hold most of ``key``."""
        found: dict[int, int] = {}
        seen = 0
        depth = depth_within(key, self._resident.bits)
        while depth >= least_depth and len(found) < MAX_HOLDERS:
            fresh = self._bits_at(key, depth) & ~seen
            slots = islice(self._slots_from(fresh, key), MAX_HOLDERS - len(found))
            found.update((slot, depth) for slot in slots)
            seen |= fresh
            depth = self._deepest_of_others(key, least_depth, depth - 1, seen)
        return found

    def _store(self, cache: WorkerCache, digests: Collection[bytes]) -> None:
        cache.resident.update(digests)
        self._resident.add(digests, cache.bit)

    def _evict(self, cache: WorkerCache, digests: Collection[bytes]) -> None:
        cache.resident.difference_update(digests)
        self._resident.discard(digests, cache.bit)

    def _see(self, cache: WorkerCache) -> None:
        self._resident.discard(cache.see(), cache.bit)

    def _deepest_of_others(self, key: bytes, low: int, high: int, seen: int) -> int:
        """The greatest depth from ``low`` to ``high`` with holders not ``seen``, or 0.

        Holders only become more towards the root.
        """
        if low > high or not self._bits_at(key, low) & ~seen:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if self._bits_at(key, middle) & ~seen:
                low = middle
            else:
                high = middle - 1
        return low

    def _bits_at(self, key: bytes, depth: int) -> int:
        return self._resident.bits.get(hash_at(key, depth), 0)

    def _slots_from(self, bits: int, key: bytes) -> Iterator[int]:
        return bits_from(bits, int.from_bytes(key[-8:]) % len(self._ids))
