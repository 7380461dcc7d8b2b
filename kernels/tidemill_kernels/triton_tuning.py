"""Launch shapes of the Triton kernels: pure arithmetic, nothing is timed at run time.

The figures come from compiling for sm_80, sm_90 and sm_100 and reading registers, shared memory
and instruction mix (tests/kernels/test_triton_compile.py holds the limits); they have not been
timed on a device yet.
"""

from dataclasses import dataclass

BLOCK_SIZES = frozenset({16, 32, 64, 128})
MAX_HEAD_DIM = 256
_MAX_SPLITS = 32
_PROGRAMS_PER_SM = 4
_MIN_TILES_PER_SPLIT = 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the attention kernels are specialised for.

    Attributes:
        group_size: query heads that share a KV head.
        head_dim: 1 to 256.
        element_size: bytes of a cache element, 2 or 4.
        block_size: tokens of a cache block.
        alignment: a power of two, 16 at most, that divides the offset of every cached token.
    """

    group_size: int
    head_dim: int
    element_size: int
    block_size: int
    alignment: int = 16

    @property
    def dim_padded(self) -> int:
        """The width of the blocks that hold a head; matrix products need 16 at least."""
        return padded_dim(self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's padded key."""
        return self.dim_padded * self.element_size


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Tile sizes and compiler options of one launch.

    Attributes:
        block_m: query rows a program (heads of a group, times tokens in a prefill).
        tile: cached tokens a program reads at once.
        num_warps: warps a program.
        num_stages: depth of the load pipeline.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int

    def constants(self, geometry: Geometry) -> dict[str, int]:
        """Return the constexpr arguments that every attention kernel takes."""
        return {
            "GROUP": geometry.group_size,
            "HEAD_DIM": geometry.head_dim,
            "DIM_PADDED": geometry.dim_padded,
            "BLOCK_SIZE": geometry.block_size,
            "BLOCK_M": self.block_m,
            "TILE": self.tile,
            "ALIGN": geometry.alignment,
        }

    def options(self) -> dict[str, int]:
        """Return the compiler options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`, for value >= 1."""
    return 1 << (value - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Return the power of two, 16 at least, that a head dimension is padded to."""
    return max(16, next_power_of_2(head_dim))


def decode_shape(geometry: Geometry) -> LaunchShape:
    """Return the decode launch: memory-bound, so small programs, many of them per SM."""
    block_m = max(16, next_power_of_2(geometry.group_size))
    if geometry.element_size == 4:
        return _float32_shape(geometry, block_m)
    # Keys and values in flight stay below about 50 KB, so that several programs fit an SM.
    tile = 64 if geometry.row_bytes <= 256 else 32
    return LaunchShape(block_m, tile, num_warps=4 if block_m <= 64 else 8, num_stages=3)


def prefill_shape(geometry: Geometry) -> LaunchShape:
    """Return the prefill launch: compute-bound, so 64 rows or more for the tensor cores."""
    if geometry.element_size == 4:
        return _float32_shape(geometry, max(16, next_power_of_2(geometry.group_size)))
    block_m = max(64, next_power_of_2(geometry.group_size))
    if geometry.row_bytes > 256:
        return LaunchShape(block_m, tile=32, num_warps=8, num_stages=2)
    return LaunchShape(block_m, tile=64, num_warps=4 if block_m == 64 else 8, num_stages=3)


def _float32_shape(geometry: Geometry, block_m: int) -> LaunchShape:
    # Exact float32 products run on the ordinary units, whose operands live in registers.
    tile = max(16, 64 * 256 // geometry.row_bytes * 16 // block_m)
    return LaunchShape(block_m, min(tile, 64), num_warps=4 if block_m == 16 else 8, num_stages=3)


def choose_num_splits(num_seqs: int, kv_heads: int, max_tiles: int, num_sms: int) -> int:
    """Return into how many programs each (sequence, KV head) is split: a power of two.

    Enough to give every multiprocessor a few programs, but none with less than two tiles.
    """
    wanted = -(-num_sms * _PROGRAMS_PER_SM // (num_seqs * kv_heads))
    splits = 1
    while splits < min(wanted, _MAX_SPLITS) and max_tiles >= 2 * splits * _MIN_TILES_PER_SPLIT:
        splits *= 2
    return splits
