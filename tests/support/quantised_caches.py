"""Attention problems whose caches hold 8 bits an element, and what these stand for."""

from dataclasses import dataclass, replace

import torch

from support.attention_cases import Problem
from tidemill_kernels import KVScales, reference
from tidemill_kernels.options import AttentionOptions

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
#: Half the distance of neighbouring numbers: relative to the number, and, where that is less, in
#: scales (integers; floats below the normal ones).
HALF_STEPS = {
    torch.int8: (0.0, 0.5),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
    torch.float8_e5m2: (2.0**-3, 2.0**-17),
}


@dataclass(frozen=True)
class QuantisedProblem:
    """A problem with the codes and scales of its caches."""

    plain: Problem
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    scales: KVScales | None

    def expected(self, options: AttentionOptions | None = None) -> torch.Tensor:
        """Return float64 attention over the numbers that the codes stand for."""
        assert self.scales is not None
        keys = dequantise(self.key_cache, self.scales.keys)
        values = dequantise(self.value_cache, self.scales.values)
        return replace(self.plain, key_cache=keys, value_cache=values).expected(options)


def dequantise(cache: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers in float64, on the CPU."""
    return cache.cpu().double() * scales.cpu().double()[..., None]


def make_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, device: str = "cpu"
) -> tuple[tuple[torch.Tensor, torch.Tensor], KVScales]:
    """Return caches of ones and scales of NaN, so that a slot never written is seen."""
    caches = [torch.ones(shape, device=device).to(dtype) for _ in range(2)]
    scales = [torch.full(shape[:3], float("nan"), device=device) for _ in range(2)]
    return (caches[0], caches[1]), KVScales(*scales)


def quantise_problem(problem: Problem, dtype: torch.dtype) -> QuantisedProblem:
    """Return the problem with its caches quantised by the reference; guard blocks are poisoned."""
    num_blocks, kv_heads, block_size, head_dim = problem.key_cache.shape
    device = problem.key_cache.device
    shape = (num_blocks, kv_heads, block_size, head_dim)
    (keys, values), scales = make_cache(shape, dtype)
    rows = [
        cache.cpu().transpose(1, 2).reshape(-1, kv_heads, head_dim)
        for cache in (problem.key_cache, problem.value_cache)
    ]
    slots = torch.arange(num_blocks * block_size)
    reference.reshape_and_cache(rows[0], rows[1], keys, values, slots, scales)
    moved = KVScales(scales.keys.to(device), scales.values.to(device))
    return QuantisedProblem(problem, keys.to(device), values.to(device), moved)
