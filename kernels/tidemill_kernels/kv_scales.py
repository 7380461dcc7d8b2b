"""KV caches of 8 bits: how a row becomes codes and a scale, and what these stand for."""

from dataclasses import dataclass

import torch

#: Dtypes of quantised caches, with the largest number of each: what a row's largest is scaled to.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: Rows of smaller numbers count as zeros: their scale would lose its own precision.
TINY = 2.0**-100


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """The scales of one layer's quantised cache: an element stands for code x scale.

    Attributes:
        keys: float32 [num_blocks, kv_heads, block_size], one scale per token and KV head.
        values: like `keys`.
    """

    keys: torch.Tensor
    values: torch.Tensor


def quantise_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of `dtype` [..., dim] and scales, float32 [...], for rows [..., dim].

    A row depends on nothing but itself. Its largest number becomes the largest of `dtype`, so
    nothing is clipped; codes are the nearest ones, ties to even. A row with an element that is not
    finite gets a scale of NaN, so that the fault is not hidden.
    """
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    scales = largest / LARGEST[dtype]
    scales = torch.where(largest < TINY, 0.0, scales)
    scales = torch.where(largest.isfinite(), scales, float("nan"))
    divisors = torch.where(scales == 0.0, 1.0, scales)
    numbers = (wide / divisors[..., None]).nan_to_num(0.0)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that torch can index: it cannot scatter or gather 8-bit floats on a CPU."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
