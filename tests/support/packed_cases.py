"""Random packed weights of every kind, with the plain weights that they stand for in float64."""

from dataclasses import dataclass

import torch

from tidemill_kernels.packed_weight import CodeKind, PackedWeight


@dataclass(frozen=True)
class PackedCase:
    """A weight and its value, computed one code at a time."""

    weight: PackedWeight
    plain: torch.Tensor


def make_case(
    kind: CodeKind,
    rows: int,
    columns: int,
    group_size: int,
    *,
    zeros: bool = False,
    table_rows: int = 1,
) -> PackedCase:
    """Return a random weight; tables are taken by kind ``TABLE4`` alone."""
    generator = torch.Generator().manual_seed(rows * columns + group_size)
    groups = -(-columns // group_size)
    limit = 16 if kind.per_byte == 2 else 256
    codes = torch.randint(0, limit, (rows, columns), generator=generator)
    if kind is CodeKind.FP8:
        codes[(codes & 127) == 127] = 0  # not a number
    scales = torch.rand(rows, groups, generator=generator) + 0.5
    zero_points = torch.randint(0, limit, (rows, groups), generator=generator).half()
    table = torch.randn(table_rows, 16, generator=generator) if kind is CodeKind.TABLE4 else None
    plain = _values(kind, codes, table)
    for column in range(columns):
        group = column // group_size
        if zeros:
            plain[:, column] -= zero_points[:, group].double()
        plain[:, column] *= scales[:, group].double()
    packed = codes.to(torch.uint8)
    if kind.per_byte == 2:
        packed = packed[:, ::2] + 16 * packed[:, 1::2]
    weight = PackedWeight(
        kind, packed, scales, group_size, zeros=zero_points if zeros else None, table=table
    )
    return PackedCase(weight, plain)


def _values(kind: CodeKind, codes: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    if kind is CodeKind.FP8:
        return torch.tensor([[e4m3(int(code)) for code in row] for row in codes]).double()
    if table is None:
        return codes.double()
    rows = table.double().expand(len(codes), 16)
    return torch.stack([row[code] for row, code in zip(rows, codes, strict=True)])


def e4m3(code: int) -> float:
    """The value of an OCP 8-bit float with four bits of exponent."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


CASES = {
    "int4 groups with zeros": lambda: make_case(CodeKind.INT4, 40, 128, 32, zeros=True),
    "int4 one odd group": lambda: make_case(CodeKind.INT4, 33, 90, 90, zeros=True),
    "int8 per channel": lambda: make_case(CodeKind.INT8, 40, 72, 72, zeros=True),
    "fp8 blocks": lambda: make_case(CodeKind.FP8, 40, 256, 128),
    "fp8 a short last group": lambda: make_case(CodeKind.FP8, 16, 80, 64),
    "one table": lambda: make_case(CodeKind.TABLE4, 40, 64, 16),
    "a table each row": lambda: make_case(CodeKind.TABLE4, 40, 64, 64, table_rows=40),
}
