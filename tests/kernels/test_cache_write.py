"""Cache writes on the CPU: every token in its slot, and nothing else touched."""

import pytest
import torch

from tidemill_kernels import AttentionBackend, reference, select_backend

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return select_backend(CPU, prefer=request.param)


def make_tokens(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # Views into a fused projection, as a model hands them over: rows are not adjacent.
    fused = torch.randn(num_tokens, 3, 3, 24).to(dtype)
    return fused[:, 1], fused[:, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 37, 700])
def test_tokens_land_in_their_slots_and_nowhere_else(
    backend: AttentionBackend, dtype: torch.dtype, block_size: int, num_tokens: int
) -> None:
    key, value = make_tokens(num_tokens, dtype)
    num_blocks = num_tokens // block_size + 3
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::5] = -1
    expected = torch.randn(2, num_blocks, 3, block_size, 24).to(dtype)
    actual = expected.clone()
    reference.reshape_and_cache(key, value, expected[0], expected[1], slots)
    backend.reshape_and_cache(key, value, actual[0], actual[1], slots)
    assert torch.equal(actual, expected)


def test_caches_that_are_views_are_written_in_place(backend: AttentionBackend) -> None:
    key, value = make_tokens(6, torch.float32)
    # One allocation with keys and values side by side in every block.
    pool = torch.zeros(4, 2, 3, 4, 24)
    slots = torch.tensor([15, 0, 7, -1, 3, 8])
    backend.reshape_and_cache(key, value, pool[:, 0], pool[:, 1], slots)
    assert torch.equal(pool[3, 0, :, 3], key[0])
    assert torch.equal(pool[2, 1, :, 0], value[5])
    assert int(pool.any(dim=-1).sum()) == 2 * 5 * 3


def test_a_slot_beyond_the_cache_is_refused_and_nothing_is_written() -> None:
    key, value = make_tokens(2, torch.float32)
    caches = torch.zeros(2, 4, 3, 16, 24)
    with pytest.raises(IndexError, match="token 1: slot 64 is beyond the 64 slots"):
        select_backend(CPU, prefer="native").reshape_and_cache(
            key, value, caches[0], caches[1], torch.tensor([0, 64])
        )
    assert not caches.any()


def test_a_dtype_other_than_the_caches_is_refused(backend: AttentionBackend) -> None:
    key, value = make_tokens(1, torch.bfloat16)
    caches = torch.zeros(2, 1, 3, 16, 24)
    with pytest.raises(ValueError, match=r"key is torch\.bfloat16, the cache is torch\.float32"):
        backend.reshape_and_cache(key, value, caches[0], caches[1], torch.tensor([0]))
