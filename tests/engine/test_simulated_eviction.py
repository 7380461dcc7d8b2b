"""The simulator evicts what a worker evicts, in the same order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_engine import make_seq
from tidemill.protocol.prefix import ROUTING_STRIDE, hash_blocks
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.free_blocks import WATCHED_SHARE as WORKER_SHARE
from tidemill_scheduler.simulation.kv_cache import WATCHED_SHARE, KvCache
from tidemill_scheduler.simulation.workload import unpack_key

NUM_HASHES = 12
NUM_BLOCKS = NUM_HASHES * ROUTING_STRIDE


class Twins:
    """A worker's cache and its model, to which the same happens.

    Prompts are as long as so many routing hashes, and the last one is found nowhere: for the model
    knows no smaller part, and the worker computes the end of every prompt.
    """

    def __init__(self) -> None:
        self.worker = BlockManager(NUM_BLOCKS, 1, watermark=0.0)
        self.model = KvCache(NUM_BLOCKS)
        self.running: list[tuple[Sequence, tuple[int, ...]]] = []
        self._num_prompts = 0

    def admit(self, path: list[int], priority: int) -> bool:
        self._num_prompts += 1
        numbers = [*path, 100 + self._num_prompts]
        seq = make_seq([n for n in numbers for _ in range(ROUTING_STRIDE)], priority=priority)
        prefix = self.worker.find_prefix(seq)
        if not self.worker.can_admit(seq, prefix):
            return False
        self.worker.adopt_prefix(seq, prefix)
        seq.num_computed_tokens = len(prefix)
        assert self.worker.allocate(seq, seq.num_uncomputed_tokens)
        seq.num_computed_tokens = seq.num_tokens
        self.worker.commit_step()
        chain = chain_of(seq)
        depth = self.model.find(chain)
        assert depth * ROUTING_STRIDE == len(prefix)
        num_new = self.model.count_new(chain, depth, seq.num_tokens)
        self.model.reserve(chain, depth, num_new)
        self.model.publish(chain[depth:])
        self.running.append((seq, chain))
        return True

    def end(self, number: int) -> None:
        seq, chain = self.running.pop(number % len(self.running))
        self.worker.free(seq)
        self.model.free(chain, 0, is_batch=seq.priority > 0)

    def check(self) -> None:
        self.worker.check_integrity([seq for seq, _ in self.running])
        events = self.worker.collect_events()
        stored, evicted = (events.stored, events.evicted) if events else (b"", b"")
        model_stored, model_evicted = self.model.take_changes()
        assert sorted(unpack_key(stored)) == sorted(model_stored)
        assert sorted(unpack_key(evicted)) == sorted(model_evicted)
        assert self.worker.num_free_blocks == self.model.num_free


def chain_of(seq: Sequence) -> tuple[int, ...]:
    hashes = hash_blocks(seq.prompt_ids, 1)
    return unpack_key(b"".join(h[:8] for h in hashes[ROUTING_STRIDE - 1 :: ROUTING_STRIDE]))


PATHS = st.lists(st.integers(1, 3), max_size=4)
#: A sequence of a priority comes, or one of those that run ends.
ACTIONS = st.tuples(PATHS, st.integers(-1, 1)) | st.integers(0, 9)


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, min_size=20, max_size=60))
def test_a_worker_and_its_model_evict_the_same(actions: list[tuple[list[int], int] | int]) -> None:
    twins = Twins()
    for action in actions:
        if not isinstance(action, int):
            while not twins.admit(*action):
                twins.end(0)
        elif twins.running:
            twins.end(action)
        twins.check()


def test_a_worker_and_its_model_protect_as_much() -> None:
    assert WORKER_SHARE == WATCHED_SHARE
