"""How large the KV cache of a GPU becomes: the formula, and the step it is measured with."""

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.memory.memory_profile import GIB, MemoryProfile, largest_step


def test_the_cache_gets_what_weights_step_and_others_leave_of_the_share() -> None:
    profile = MemoryProfile(total=80 * GIB, weights=16 * GIB, step_peak=3 * GIB, other=GIB)
    assert profile.kv_cache_bytes(0.9) == 52 * GIB
    assert profile.describe(0.9) == (
        "KV cache 52.00 GiB = 0.9 x 80.00 GiB - weights 16.00 GiB - step 3.00 GiB - other 1.00 GiB"
    )


def test_a_share_that_leaves_nothing_is_refused_with_all_figures() -> None:
    profile = MemoryProfile(total=24 * GIB, weights=16 * GIB, step_peak=3 * GIB, other=GIB)
    with pytest.raises(ConfigError, match=r"0\.5 of 24\.00 GiB less 16\.00 GiB of weights"):
        profile.kv_cache_bytes(0.5)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "shape"),
    [
        (64, 2048, 4096, (64, 32)),
        (64, 2048, 20, (64, 20)),
        (3, 2048, 4096, (3, 682)),
        (64, 64, 4096, (64, 1)),
    ],
)
def test_the_largest_step_has_as_many_rows_and_tokens_as_a_step_may(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, shape: tuple[int, int]
) -> None:
    plan = largest_step(max_num_seqs, max_num_batched_tokens, max_model_len, 16)
    num_seqs, length = shape
    assert len(plan.sampling) == num_seqs
    assert {item.num_tokens for item in plan.scheduled} == {length}
    blocks = {tuple(item.seq.block_table) for item in plan.scheduled}
    assert blocks == {tuple(range(-(-length // 16)))}
