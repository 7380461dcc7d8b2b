"""The paged KV cache: how many blocks fit, and the tensors that hold them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_kernels import KVScales
from tidemill_kernels.kv_scales import LARGEST

#: Names of ``--kv-cache-dtype`` but for auto, which is the dtype of the weights.
KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [num_blocks, kv_heads, block_size, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, and the scales of all or none of them."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    scales: tuple[KVScales, ...] = ()

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """The layers, one by one."""
        scales = self.scales or (None,) * len(self.keys)
        return tuple(map(LayerCache, self.keys, self.values, scales))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that belongs to blocks: each tensor has one row a block."""
        scales = [tensor for pair in self.scales for tensor in (pair.keys, pair.values)]
        return (*self.keys, *self.values, *scales)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.keys[0].shape[0]

    @property
    def num_bytes(self) -> int:
        """Size of the pool when every block has been used."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def make_kv_cache(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Reserve the pool; on the CPU the system commits its pages when they are first written.

    A ``dtype`` of 8 bits gets scales.
    """
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in layers),
        values=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in layers),
        scales=tuple(_make_scales(shape[:3], device) for _ in layers) if dtype in LARGEST else (),
    )


def choose_kv_dtype(name: str, weights: torch.dtype) -> torch.dtype:
    """Return the dtype that ``name`` stands for beside weights of this dtype.

    Raises ConfigError for an unknown name.
    """
    if name == "auto":
        return weights
    if name not in KV_DTYPES:
        raise ConfigError(
            f"unknown KV cache dtype {name!r}", fix=f"Choose auto or one of {list(KV_DTYPES)}."
        )
    return KV_DTYPES[name]


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, its scales included."""
    elements = config.kv_elements_per_token
    scales = elements // config.head_dim if dtype in LARGEST else 0
    return block_size * (elements * dtype.itemsize + scales * _SCALE_BYTES)


def num_blocks_in(num_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return how many blocks fit into ``num_bytes``.

    Raises:
        ConfigError: not a single one does.
    """
    each = bytes_per_block(config, block_size, dtype)
    if num_bytes < each:
        raise ConfigError(
            f"{num_bytes} bytes of KV cache are less than one block of {each} bytes",
            fix="Raise the size of the KV cache or lower the block size.",
        )
    return num_bytes // each


def num_swap_blocks_in(num_bytes: int, bytes_per_block: int) -> int:
    """Return how many blocks fit into the swap space.

    Raises:
        ConfigError: the host has not so much memory.
    """
    free = available_bytes(torch.device("cpu"))
    if num_bytes > free:
        raise ConfigError(
            f"a swap space of {num_bytes} bytes does not fit into the {free} bytes that are free",
            fix="Lower --swap-space.",
        )
    return num_bytes // bytes_per_block


def check_fits(
    num_blocks: int,
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ConfigError if the pool takes more memory than ``device`` could still hand out."""
    wanted, free = num_blocks * bytes_per_block(config, block_size, dtype), available_bytes(device)
    if wanted > free:
        raise ConfigError(
            f"a KV cache of {wanted} bytes does not fit into the {free} bytes that are free",
            fix="Lower the size of the KV cache.",
        )


def _make_scales(shape: tuple[int, ...], device: torch.device) -> KVScales:
    return KVScales(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)))


def available_bytes(device: torch.device) -> int:
    """Return the memory that ``device`` could still hand out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_ram(Path("/proc/meminfo"))


def _free_ram(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{meminfo} names no MemAvailable", fix="Give the KV cache size in bytes.")
