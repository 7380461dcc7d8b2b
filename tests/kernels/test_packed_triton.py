"""The Triton product with packed weights, in the interpreter, against float64."""

import pytest
import torch

pytest.importorskip("triton")

from support import triton_interpreter
from support.packed_cases import CASES, make_case
from tidemill_kernels import triton_packed
from tidemill_kernels.packed_weight import CodeKind

pytestmark = pytest.mark.interpret


@pytest.fixture(scope="module", autouse=True)
def corrected_interpreter() -> None:
    triton_interpreter.install()


@pytest.mark.parametrize("num_rows", [3, 37])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_equals_the_plain_weight(name: str, num_rows: int) -> None:
    case = CASES[name]()
    x = torch.randn(num_rows, case.plain.shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.double() @ case.plain.T
    found = triton_packed.multiply(x, case.weight).double()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_off_by_its_rounding_alone(dtype: torch.dtype) -> None:
    case = make_case(CodeKind.INT4, 32, 128, 64, zeros=True)
    x = torch.randn(17, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    # The weight is rounded to the dtype, products are summed in float32, the sum is rounded.
    expected = x.double() @ case.weight.dequantise().to(dtype).double().T
    found = triton_packed.multiply(x, case.weight)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (found.double() - expected).abs().max() <= eps * expected.abs().max()


def test_groups_too_small_for_a_tile_are_left_to_others() -> None:
    assert not triton_packed.supports(make_case(CodeKind.INT4, 4, 32, 8).weight)
    assert triton_packed.supports(make_case(CodeKind.INT4, 4, 32, 16).weight)
    assert triton_packed.supports(make_case(CodeKind.INT4, 4, 90, 90).weight)
