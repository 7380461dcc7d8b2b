"""Codes that checkpoints pack into 32-bit words."""

import torch

from tidemill_kernels.packed_weight import CodeKind, pack_nibbles


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 codes [rows, n * 32 / bits] of int32 words [rows, n], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1).to(torch.uint8)


def pack_codes(codes: torch.Tensor, bits: int) -> tuple[CodeKind, torch.Tensor]:
    """Return the kind of integer codes of so many bits, and uint8 codes [rows, n] in its layout."""
    if bits <= 4:
        return CodeKind.INT4, pack_nibbles(codes)
    return CodeKind.INT8, codes


def constant_zeros(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the zeros of symmetric codes: the middle of their range, shaped like ``scales``."""
    return torch.full_like(scales, 1 << (bits - 1), dtype=torch.float16)


def num_groups(in_features: int, group_size: int) -> int:
    """Return how many groups of columns there are; the last may be short."""
    return -(-in_features // group_size)
