"""The Triton kernels compiled for GPUs that are not there: it must compile, and compile well."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

pytest.importorskip("triton")

from support.triton_compile import Binary, compile_kernel
from tidemill_kernels.triton_cache import cache_write_kernel, quantising_write_kernel
from tidemill_kernels.triton_decode import decode_kernel, reduce_kernel
from tidemill_kernels.triton_prefill import prefill_kernel
from tidemill_kernels.triton_tuning import Geometry, decode_shape, prefill_shape

pytestmark = pytest.mark.compile_only

HOPPER = 90
ELEMENT_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
# Group size, head_dim, block size.
SIXTEEN_BIT = [(8, 128, 16), (8, 128, 64), (4, 64, 16), (3, 64, 32), (71, 64, 16), (4, 80, 16)]
FLOAT32 = [(3, 64, 16), (8, 128, 64)]
# Compiled in every run; the other options below have the first one too.
FAST_DECODE = [(8, 128, 16), (71, 64, 16)]
FAST_PREFILL = [(8, 128, 16), (4, 80, 16)]
FAST_FLOAT32 = [(3, 64, 16)]
OTHER_GPUS = [80, 100]
PLAIN = {"WINDOW": 0, "SOFT_CAP": 0.0, "HAS_SINKS": False, "KV_FORMAT": 0}
# Formats of quantised caches, with Triton's type of their codes and the largest number.
QUANTISED = {"int8": (1, "i8", 127.0), "e4m3": (2, "u8", 448.0), "e5m2": (3, "u8", 57344.0)}
OPTIONS = {
    "window": PLAIN | {"WINDOW": 4096},
    "soft cap": PLAIN | {"SOFT_CAP": 50.0},
    "window and sinks": PLAIN | {"WINDOW": 128, "HAS_SINKS": True},
}
ALL_OPTIONS = PLAIN | {"WINDOW": 4096, "SOFT_CAP": 50.0, "HAS_SINKS": True}
INT32_POINTERS = {"block_tables_ptr", "seq_lens_ptr", "cu_seqlens_ptr"}


def others_slow(values: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Parameters of which those that are not in ``fast`` are left to ``make slow``."""
    slow = pytest.mark.slow
    return [pytest.param(value, marks=() if value in fast else slow) for value in values]


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # A shared cache would hide that a kernel does not compile any more.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def argument_type(name: str, dtype: str, codes: str) -> str:
    if name.startswith("partial") or name.endswith("_scales_ptr"):
        return "*fp32"
    if name.endswith("_cache_ptr"):
        return f"*{codes or dtype}"
    if name == "slot_mapping_ptr":
        return "*i64"
    if name == "sinks_ptr":
        return "*fp32"
    if name.endswith("_ptr"):
        return "*i32" if name in INT32_POINTERS else f"*{dtype}"
    return "fp32" if name == "qk_scale" else "i32"


def build(
    kernel: Any,
    capability: int,
    dtype: str,
    constants: dict[str, Any],
    options: dict[str, int],
) -> Binary:
    names = [parameter.name for parameter in kernel.params]
    formats = {number: codes for number, codes, _ in QUANTISED.values()}
    codes = formats.get(constants.get("KV_FORMAT", 0), "")
    types = {name: argument_type(name, dtype, codes) for name in names if name not in constants}
    return compile_kernel(kernel, capability, types=types, constants=constants, options=options)


def build_decode(
    capability: int,
    dtype: str,
    case: tuple[int, int, int],
    options: dict[str, int | float] = PLAIN,
) -> Binary:
    geometry = make_geometry(dtype, case)
    shape = decode_shape(geometry)
    constants = shape.constants(geometry) | options | {"NUM_SPLITS": 8}
    return build(decode_kernel, capability, dtype, constants, shape.options())


def build_prefill(
    capability: int,
    dtype: str,
    case: tuple[int, int, int],
    options: dict[str, int | float] = PLAIN,
) -> Binary:
    geometry = make_geometry(dtype, case)
    shape = prefill_shape(geometry)
    constants = shape.constants(geometry) | options
    constants["BLOCK_Q"] = shape.block_m // geometry.group_size
    return build(prefill_kernel, capability, dtype, constants, shape.options())


def make_geometry(dtype: str, case: tuple[int, int, int]) -> Geometry:
    group_size, head_dim, block_size = case
    return Geometry(group_size, head_dim, ELEMENT_SIZES[dtype], block_size)


def check_loads(binary: Binary) -> None:
    # Loads of the cache must be wide and pipelined; a few block ids may be copied one by one.
    assert binary.count(r"LDG\.E\.U16") == 0
    wide = binary.count(r"LDGSTS\.E[.\w]*\.128")
    assert wide > 0
    assert binary.count("LDGSTS") - wide <= 16


@pytest.mark.parametrize("case", others_slow(SIXTEEN_BIT, FAST_DECODE), ids=str)
def test_decode_fits_registers_and_shared_memory_on_hopper(case: tuple[int, int, int]) -> None:
    binary = build_decode(HOPPER, "bf16", case)
    assert binary.spills() == 0
    assert binary.shared_bytes <= 100 * 1024
    assert binary.count("HMMA") + binary.count("HGMMA") > 0
    check_loads(binary)


@pytest.mark.parametrize("case", others_slow(SIXTEEN_BIT, FAST_PREFILL), ids=str)
def test_prefill_uses_warpgroup_products_without_spills_on_hopper(
    case: tuple[int, int, int],
) -> None:
    binary = build_prefill(HOPPER, "bf16", case)
    assert binary.spills() == 0
    assert binary.count("HGMMA") > 0
    check_loads(binary)


def test_all_options_together_cost_no_spills_on_hopper() -> None:
    check_options(ALL_OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_cost_no_spills_on_hopper(options: dict[str, int | float]) -> None:
    check_options(options)


def check_options(options: dict[str, int | float]) -> None:
    decode = build_decode(HOPPER, "bf16", (8, 128, 16), options)
    prefill = build_prefill(HOPPER, "bf16", (8, 128, 16), options)
    assert decode.spills() == prefill.spills() == 0
    assert decode.shared_bytes <= 100 * 1024
    assert prefill.count("HGMMA") > 0
    for binary in (decode, prefill):
        check_loads(binary)


@pytest.mark.parametrize("case", others_slow(FLOAT32, FAST_FLOAT32), ids=str)
def test_float32_neither_spills_nor_turns_into_tf32_on_hopper(case: tuple[int, int, int]) -> None:
    for binary in (build_decode(HOPPER, "fp32", case), build_prefill(HOPPER, "fp32", case)):
        assert binary.spills() == 0
        assert binary.count("HMMA") + binary.count("HGMMA") == 0


def test_float16_compiles_as_well_as_bfloat16() -> None:
    assert build_decode(HOPPER, "fp16", (8, 128, 16)).spills() == 0
    assert build_prefill(HOPPER, "fp16", (8, 128, 16)).spills() == 0


@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_ampere_and_blackwell_compile_both_kernels(capability: int) -> None:
    assert build_decode(capability, "bf16", (8, 128, 16)).shared_bytes <= 100 * 1024
    assert build_prefill(capability, "bf16", (8, 128, 16)).shared_bytes <= 160 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_ampere_and_blackwell_compile_float32_without_spills(capability: int) -> None:
    assert build_decode(capability, "fp32", (3, 64, 16)).spills() == 0


@pytest.mark.parametrize("capability", others_slow([HOPPER, *OTHER_GPUS], [HOPPER]))
def test_the_small_kernels_compile_without_spills(capability: int) -> None:
    head = {"HEAD_DIM": 128, "DIM_PADDED": 128}
    heads = {"KV_HEADS": 8, "HEADS_PADDED": 8, "BLOCK_SIZE": 16}
    write = build(cache_write_kernel, capability, "bf16", head | heads, {"num_warps": 4})
    reduce = build(reduce_kernel, capability, "bf16", head | {"NUM_SPLITS": 32}, {"num_warps": 4})
    assert write.spills() == reduce.spills() == 0
    assert write.count(r"STG\.E\.U16") == 0


@pytest.mark.parametrize("capability", others_slow([HOPPER, *OTHER_GPUS], [HOPPER]))
@pytest.mark.parametrize("name", others_slow(QUANTISED, ["int8"]))
def test_quantised_caches_compile_and_cost_no_spills_on_hopper(name: str, capability: int) -> None:
    number, _, largest = QUANTISED[name]
    options = PLAIN | {"KV_FORMAT": number}
    decode = build_decode(capability, "bf16", (8, 128, 16), options)
    prefill = build_prefill(capability, "bf16", (8, 128, 16), options)
    assert decode.shared_bytes <= 100 * 1024
    assert decode.spills() == 0
    # Elsewhere some prefills spill a little; on Ampere those of a plain cache do as well.
    assert prefill.spills() <= (0 if capability == HOPPER else 100)
    head = {"HEAD_DIM": 128, "DIM_PADDED": 128, "KV_HEADS": 8, "HEADS_PADDED": 8}
    write = {"BLOCK_SIZE": 16, "KV_FORMAT": number, "LARGEST": largest, "TINY": 2.0**-100}
    options = {"num_warps": 4}
    assert build(quantising_write_kernel, capability, "bf16", head | write, options).spills() == 0


def test_the_kernels_refuse_nothing_that_the_launcher_offers() -> None:
    # Every product must have 16 rows, columns and depth at least, and powers of two throughout.
    for case in [(g, d, b) for g in (1, 5, 71, 128) for d in (8, 80, 256) for b in (16, 128)]:
        for dtype in ELEMENT_SIZES:
            geometry = make_geometry(dtype, case)
            for shape in (decode_shape(geometry), prefill_shape(geometry)):
                sizes = (shape.block_m, shape.tile, geometry.dim_padded)
                assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
                assert shape.block_m >= geometry.group_size
