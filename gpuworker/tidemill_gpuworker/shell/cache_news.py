"""What a worker tells of its prefix cache, next to its status."""

from dataclasses import dataclass

from tidemill.protocol.messages import KvEvents, KvSnapshot
from tidemill_gpuworker.engine.job_engine import CacheView

#: A snapshot comes with the first batch of events and then with every so many entries, so that
#: the stream, which is cut at a thousand, always holds all batches since the last one, and so
#: that an idle worker, which makes an entry every few seconds, renews it in time.
ENTRIES_PER_SNAPSHOT = 128


@dataclass(frozen=True, slots=True)
class CacheNews:
    """A batch of events, a snapshot that includes it and all before it, or both."""

    events: KvEvents | None
    snapshot: KvSnapshot | None


class CacheObserver:
    """Decides what the next entry of the status stream tells of the cache."""

    def __init__(self, blocks: CacheView) -> None:
        self._blocks = blocks
        self._num_entries = 0

    def observe(self) -> CacheNews | None:
        """Return what is to be told now, None if nothing; between steps only."""
        events = self._blocks.collect_events()
        self._num_entries += 1
        is_first = events is not None and events.seq == 1
        snapshot = None
        if is_first or self._num_entries >= ENTRIES_PER_SNAPSHOT:
            self._num_entries = 0
            # Also without events: the one before may be about to expire.
            snapshot = self._blocks.snapshot()
        if events is None and (snapshot is None or not snapshot.seq):
            return None
        return CacheNews(events, snapshot)
