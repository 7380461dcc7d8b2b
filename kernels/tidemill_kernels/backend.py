"""Choose the implementation of the kernels for a device."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tidemill_kernels import randomness, reference, torch_ops
from tidemill_kernels.kv_scales import KVScales
from tidemill_kernels.metadata import AttentionMetadata
from tidemill_kernels.native.attention import NativeAttention
from tidemill_kernels.native.build import NativeBuildError
from tidemill_kernels.native.library import load_library
from tidemill_kernels.native.randomness import NativeRandomness

_logger = logging.getLogger(__name__)


class ReshapeAndCache(Protocol):
    """Store new keys and values in the cache; contract in `reference.reshape_and_cache`."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: KVScales | None = None,
    ) -> None:
        """Write `key` and `value` into the slots."""


class PagedAttention(Protocol):
    """Attention over the paged cache; contract in `reference.paged_attention`."""

    def __call__(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scales: KVScales | None = None,
    ) -> None:
        """Write the attention of `query` into `out`."""


class GumbelArgmax(Protocol):
    """Seeded sampling; contract in `randomness.gumbel_argmax`."""

    def __call__(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        choices: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token per row, or -1 where no logit is finite."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One implementation of every kernel; all of them share a cache layout and a contract.

    Attributes:
        name: "triton", "native", "torch" or "reference".
        block_sizes: the block sizes it takes; None means any.
    """

    name: str
    reshape_and_cache: ReshapeAndCache
    paged_attention: PagedAttention
    gumbel_argmax: GumbelArgmax
    block_sizes: frozenset[int] | None = None

    def supports_block_size(self, block_size: int) -> bool:
        """Whether caches with blocks of `block_size` tokens can be used."""
        return block_size >= 1 and (self.block_sizes is None or block_size in self.block_sizes)


def select_backend(
    device: torch.device, *, prefer: str | None = None, native_cache_dir: Path | None = None
) -> AttentionBackend:
    """Return the fastest backend for `device`, or the one named by `prefer`.

    Args:
        device: where the tensors live; cuda gets "triton", the CPU gets "native", and either
            gets "torch" (logged) where triton is missing or the C++ kernels cannot be built.
        prefer: "triton", "native", "torch" or "reference"; failing is then an error.
        native_cache_dir: where compiled C++ kernels are kept, if not in the user's cache.

    Raises:
        ValueError: `prefer` names no backend, or one that does not run on `device`.
        NativeBuildError: "native" was asked for and cannot be built.
        ImportError: "triton" was asked for and triton is not installed.
    """
    if prefer is not None:
        return _preferred(prefer, device, native_cache_dir)
    try:
        return _fastest(device, native_cache_dir)
    except (NativeBuildError, ImportError) as error:
        _logger.warning("kernels for %s unavailable, using slower torch ones: %s", device, error)
        return _torch()


def _preferred(name: str, device: torch.device, cache_dir: Path | None) -> AttentionBackend:
    makers: dict[str, Callable[[], AttentionBackend]] = {
        "triton": lambda: _triton(device),
        "native": lambda: _native(device, cache_dir),
        "torch": _torch,
        "reference": _reference,
    }
    if name not in makers:
        raise ValueError(f"unknown kernel backend {name!r}; choose one of {sorted(makers)}")
    return makers[name]()


def _fastest(device: torch.device, cache_dir: Path | None) -> AttentionBackend:
    if device.type == "cuda":
        return _triton(device)
    return _native(device, cache_dir) if device.type == "cpu" else _torch()


def _triton(device: torch.device) -> AttentionBackend:
    # Under TRITON_INTERPRET a CPU could run these, thousands of times slower: for tests only.
    if device.type != "cuda":
        raise ValueError(f"the Triton kernels run on CUDA devices, not on {device}")
    # Here because triton is optional, slow to import, and useless without a GPU.
    from tidemill_kernels import triton_attention
    from tidemill_kernels.triton_tuning import BLOCK_SIZES

    return AttentionBackend(
        name="triton",
        reshape_and_cache=triton_attention.reshape_and_cache,
        paged_attention=triton_attention.paged_attention,
        gumbel_argmax=randomness.gumbel_argmax,
        block_sizes=BLOCK_SIZES,
    )


def _native(device: torch.device, cache_dir: Path | None) -> AttentionBackend:
    if device.type != "cpu":
        raise ValueError(f"the native kernels run on the CPU, not on {device}")
    library = load_library(cache_dir)
    attention = NativeAttention(library)
    return AttentionBackend(
        name="native",
        reshape_and_cache=attention.reshape_and_cache,
        paged_attention=attention.paged_attention,
        gumbel_argmax=NativeRandomness(library).gumbel_argmax,
    )


def _torch() -> AttentionBackend:
    return AttentionBackend(
        name="torch",
        reshape_and_cache=torch_ops.reshape_and_cache,
        paged_attention=torch_ops.paged_attention,
        gumbel_argmax=randomness.gumbel_argmax,
    )


def _reference() -> AttentionBackend:
    return AttentionBackend(
        name="reference",
        reshape_and_cache=reference.reshape_and_cache,
        paged_attention=reference.paged_attention,
        gumbel_argmax=randomness.gumbel_argmax,
    )
