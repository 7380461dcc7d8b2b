"""The product with packed weights, compiled for GPUs that are not there."""

from typing import Any

import pytest

pytest.importorskip("triton")

from support.triton_compile import Binary, compile_kernel
from tidemill_kernels.packed_weight import CodeKind
from tidemill_kernels.triton_packed import packed_matmul_kernel, product_shape

pytestmark = pytest.mark.compile_only

GPUS = [80, 90, 100]


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # A shared cache would hide that the kernel does not compile any more.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def build(capability: int, kind: CodeKind, num_rows: int, dtype: str = "bf16") -> Binary:
    shape = product_shape(num_rows, 4 if dtype == "fp32" else 2, 64)
    constants = {
        "KIND": int(kind),
        "PER_BYTE": kind.per_byte,
        "HAS_ZEROS": kind in (CodeKind.INT4, CodeKind.INT8),
        "GROUP_SIZE": 128,
        **shape.tiles(),
    }
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "codes_ptr": "*u8"}
    types |= {"scales_ptr": "*fp16", "zeros_ptr": "*fp16", "table_ptr": "*fp32"}
    types |= dict.fromkeys(
        ("num_rows", "out_features", "in_features", "num_groups", "table_stride"), "i32"
    )
    options = shape.options()
    return compile_kernel(
        packed_matmul_kernel, capability, types=types, constants=constants, options=options
    )


@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [
        (CodeKind.INT4, 512),
        (CodeKind.FP8, 1),
        pytest.param(CodeKind.INT4, 1, marks=pytest.mark.slow),
        pytest.param(CodeKind.FP8, 512, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_products_use_tensor_cores_and_do_not_spill_on_hopper(
    kind: CodeKind, num_rows: int
) -> None:
    binary = build(90, kind, num_rows)
    assert binary.spills() == 0
    assert binary.count("HMMA") + binary.count("HGMMA") > 0
    assert binary.shared_bytes <= 100 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("kind", CodeKind, ids=lambda kind: kind.name)
def test_every_kind_compiles_for_every_gpu(capability: int, kind: CodeKind) -> None:
    for num_rows in (1, 512):
        assert build(capability, kind, num_rows).spills() == 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
def test_float32_stays_float32(capability: int) -> None:
    for num_rows in (1, 512):
        binary = build(capability, CodeKind.INT4, num_rows, "fp32")
        assert binary.spills() == 0
        assert binary.count("HMMA") + binary.count("HGMMA") == 0
