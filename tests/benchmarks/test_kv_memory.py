"""The comparison of KV memory: which block sizes can reach 96 %, and from what length on."""

import kv_memory
import pytest


def utilisations(mean: int) -> dict[int, float]:
    """Of each block size, over enough requests for the mean of their last blocks to tell."""
    lengths = kv_memory.draw_lengths(3000, mean, 4096, seed=1)
    used = {size: sum(-(-n // size) * size for n in lengths) for size in kv_memory.BLOCK_SIZES}
    return {size: sum(lengths) / slots for size, slots in used.items()}


@pytest.mark.parametrize("mean", [150, 300, 500, 900, 1700])
def test_a_block_size_reaches_the_goal_from_the_length_that_is_told(mean: int) -> None:
    for size, utilisation in utilisations(mean).items():
        assert (utilisation >= 0.96) == (mean >= kv_memory.least_mean(size))


def test_the_example_of_a_hundred_requests_is_what_the_blocks_allow() -> None:
    lengths = kv_memory.draw_lengths(100, 500, 4096, seed=0)
    static, *paged = kv_memory.compare(lengths, 4096)[:5]
    assert static.utilisation < 0.13
    reached = [row.name for row in paged if row.utilisation >= 0.96]
    assert reached == ["paged, blocks of 16", "paged, blocks of 32"]
    told = kv_memory.explain_goal(500)
    assert told.count(": reached") == 2 and told.count(": out of reach") == 2
