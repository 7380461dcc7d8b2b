"""What the figures of waste count."""

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, make_seq
from tidemill.protocol.kv_use import KvUse
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.kv_waste import measure_kv_use
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    seq = make_seq(tokens)
    prefix = manager.find_prefix(seq)
    manager.adopt_prefix(seq, prefix)
    seq.num_computed_tokens = len(prefix) * manager.block_size
    assert manager.allocate(seq, seq.num_uncomputed_tokens)
    seq.num_computed_tokens = len(tokens)
    manager.commit_step()
    return seq


def test_shared_blocks_count_once_and_empty_slots_where_they_are() -> None:
    manager = BlockManager(10, 4, watermark=0.0, num_swap_blocks=5)
    gone = computed(manager, list(range(100, 108)))
    manager.free(gone)
    first = computed(manager, [1, 2, 3, 4, 5])
    second = computed(manager, [1, 2, 3, 4, 6, 7])

    use = measure_kv_use(manager, [first, second])

    assert (use.num_blocks, use.used_blocks, use.cached_blocks, use.free_blocks) == (10, 3, 2, 5)
    assert (use.empty_slots, use.most_empty_slots, use.num_tokens) == (5, 3, 7)
    assert use.utilisation == pytest.approx(7 / 12)
    assert (use.swap_blocks, use.used_swap_blocks) == (5, 0)


def test_an_empty_cache_wastes_nothing() -> None:
    use = measure_kv_use(BlockManager(3, 4), [])
    assert (use.utilisation, use.most_empty_slots, use.num_tokens) == (1.0, 0, 0)
    assert KvUse().utilisation == 1.0


def test_what_is_behind_a_window_is_no_waste() -> None:
    manager = BlockManager(10, 4, watermark=0.0, window=4)
    seq = make_seq(list(range(30)))
    for num_tokens in (20, 10):
        assert manager.allocate(seq, num_tokens)
        seq.num_computed_tokens += num_tokens
        manager.commit_step()
    use = measure_kv_use(manager, [seq])
    # Blocks 4 to 7 are left, the last one half full.
    assert (use.used_blocks, use.empty_slots, use.num_tokens) == (4, 2, 14)


def test_no_sequence_ever_wastes_a_whole_block() -> None:
    manager = BlockManager(40, 8, num_swap_blocks=10)
    scheduler = StepScheduler(
        StepConfig(max_model_len=100, max_num_seqs=6, max_num_batched_tokens=24), manager
    )
    engine = Engine(FakeRunner(40, 8), FakeSampler(), scheduler, lambda seq: FakeProcessor(15))
    for number in range(12):
        engine.add(make_seq([50 * number + k for k in range(5 + 4 * number)], 15))
    while engine.has_work:
        engine.step()
        use = scheduler.kv_use
        assert use.most_empty_slots <= 7
        held = {block: seq for seq in scheduler.running for block in seq.block_table}
        assert use.used_blocks == len(held)
        assert use.used_blocks + use.cached_blocks + use.free_blocks == 40
