"""The packed layout in plain torch, against values computed one code at a time."""

import pytest
import torch

from support.packed_cases import CASES, make_case
from tidemill_kernels.packed_weight import (
    CodeKind,
    PackedWeight,
    multiply,
    pack_nibbles,
    row_blocks,
    unpack_nibbles,
)


@pytest.mark.parametrize("name", CASES)
def test_codes_stand_for_their_values(name: str) -> None:
    case = CASES[name]()
    torch.testing.assert_close(case.weight.dequantise().double(), case.plain, rtol=1e-6, atol=1e-6)
    rows = case.weight.dequantise(3, 9).double()
    torch.testing.assert_close(rows, case.plain[3:9], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_plain_weight(name: str) -> None:
    case = CASES[name]()
    x = torch.randn(5, case.plain.shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.double() @ case.plain.T
    error = (multiply(x, case.weight).double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_blocks_of_rows_cover_a_weight_once_and_are_bounded() -> None:
    blocks = list(row_blocks(5000, 4096))
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(5000))
    assert max(stop - start for start, stop in blocks) * 4096 * 4 <= 16 << 20


def test_nibbles_come_back_in_order() -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(2, 16) % 16
    assert pack_nibbles(codes)[0, 0] == 0x10
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_columns_are_put_where_their_inputs_are() -> None:
    case = make_case(CodeKind.INT8, 4, 6, 6)
    order = torch.tensor([2, 0, 1, 5, 4, 3])
    weight = PackedWeight(case.weight.kind, case.weight.codes, case.weight.scales, 6, order=order)
    x = torch.randn(3, 6)
    expected = multiply(x[:, order], weight)
    torch.testing.assert_close(x @ weight.in_input_order().T, expected)
