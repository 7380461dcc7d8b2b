"""The parts of quantised weights: together they are the whole, exactly."""

from pathlib import Path

import pytest
import torch

from support.quantised_models import ACT_ORDER, FORMATS, write_quantised
from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.parallel.linear_part import LinearPart
from tidemill_gpuworker.parallel.shard import Section, Shard
from tidemill_gpuworker.quantization.cutting import cut_weight
from tidemill_gpuworker.quantization.selection import choose_quantization
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer
from tidemill_kernels.packed_weight import CodeKind, PackedWeight

#: 128 outputs of 192 inputs: groups of 64 and 128 do not divide a rank's 96.
DOWN = "model.layers.1.mlp.down_proj"
READ = [name for name in FORMATS if name != "compressed some layers"]


def read(name: str, directory: Path) -> QuantizedWeight:
    write_quantised(name, directory)
    scheme = choose_quantization(directory, None)
    assert scheme is not None
    checkpoint = Checkpoint(directory, dtype=torch.float32, device=torch.device("cpu"))
    return scheme.format_of(DOWN).read(StoredLayer(checkpoint, DOWN, 128, 192))


def plain(weight: QuantizedWeight) -> torch.Tensor:
    whole = weight.packed.in_input_order()
    return whole if weight.outliers is None else whole + weight.outliers.to_dense()


def inputs_of(shard: Shard) -> LinearPart:
    return LinearPart((DOWN,), ((Section(128),),), Section(192 // shard.count, shard))


@pytest.mark.parametrize("name", [name for name in READ if name not in ACT_ORDER])
def test_parts_of_the_inputs_are_the_columns_of_the_whole(name: str, tmp_path: Path) -> None:
    weight = read(name, tmp_path)
    parts = [plain(cut_weight(weight, inputs_of(Shard(index, 2)))) for index in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), plain(weight))


@pytest.mark.parametrize("name", READ)
def test_parts_of_the_outputs_are_the_rows_of_the_whole(name: str, tmp_path: Path) -> None:
    weight = read(name, tmp_path)
    # As of a fused layer, whose second section several ranks share.
    sections = [
        (Section(32, Shard(index, 2)), Section(32, Shard(0, 1)), Section(16, Shard(index, 2)))
        for index in range(2)
    ]
    whole = plain(weight).split([32, 32, 32, 16, 16])
    for index, each in enumerate(sections):
        part = cut_weight(weight, LinearPart((DOWN,), (each,), Section(192)))
        assert part.packed.out_features == 80
        expected = torch.cat([whole[index], whole[2], whole[3 + index]])
        assert torch.equal(plain(part), expected)


@pytest.mark.parametrize("name", ACT_ORDER)
def test_groups_of_inputs_across_ranks_are_refused_by_the_name_of_their_layer(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{DOWN} cannot be split .* \(desc_act\)"):
        cut_weight(read(name, tmp_path), inputs_of(Shard(0, 2)))


def make_weight(order: torch.Tensor | None, in_features: int = 8) -> QuantizedWeight:
    codes = torch.arange(2 * in_features, dtype=torch.uint8).view(2, in_features)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    return QuantizedWeight(
        PackedWeight(CodeKind.INT8, codes, scales, in_features // 2, order=order)
    )


def test_an_order_within_each_part_is_kept() -> None:
    weight = make_weight(torch.tensor([2, 0, 3, 1, 7, 4, 6, 5]))
    parts = [
        LinearPart(("x",), ((Section(2),),), Section(4, Shard(index, 2))) for index in range(2)
    ]
    found = [cut_weight(weight, part).packed.in_input_order() for part in parts]
    assert torch.equal(torch.cat(found, dim=1), weight.packed.in_input_order())


def test_a_code_of_4_bits_is_not_torn_from_its_byte() -> None:
    codes = torch.zeros(2, 3, dtype=torch.uint8)
    weight = QuantizedWeight(PackedWeight(CodeKind.INT4, codes, torch.ones(2, 1), 6))
    part = LinearPart(("x",), ((Section(2),),), Section(3, Shard(0, 2)))
    with pytest.raises(UnsupportedModel, match="no whole number of bytes"):
        cut_weight(weight, part)
