"""The queue and the cache of an engine that keeps nothing between jobs."""

from collections.abc import Mapping, Sized

from tidemill.protocol.messages import KvEvents, KvSnapshot

#: Such an engine has no KV blocks, and no job may be refused for lack of them.
NUM_BLOCKS = 1 << 24


class NoCache:
    """A cache that holds nothing and has room for everything."""

    num_free_blocks = NUM_BLOCKS
    usage = 0.0

    def hint(self, refs: Mapping[bytes, int]) -> None:
        """Pass over what jobs would like to find."""

    def collect_events(self) -> KvEvents | None:
        """Return None: nothing ever changes."""
        return None

    def snapshot(self) -> KvSnapshot:
        """Return that there is nothing."""
        return KvSnapshot(seq=0)


class PlainQueue:
    """What is in an engine without a cache; ``running`` and ``waiting`` are the engine's own."""

    def __init__(self, running: Sized, waiting: Sized) -> None:
        self.running = running
        self.waiting = waiting
        self.block_manager = NoCache()
        #: Input tokens accepted and not computed yet, and those of interactive jobs among them.
        self.num_waiting_tokens = 0
        self.num_urgent_tokens = 0
        self.kv_use = None
