"""The package without its optional parts, and with the files it needs at run time."""

import subprocess
import sys
from importlib.resources import files

import pytest
import torch

from tidemill_kernels import select_backend
from tidemill_kernels.triton_tuning import Geometry, choose_num_splits, decode_shape

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import logging, torch
logging.basicConfig(level=logging.WARNING)
from tidemill_kernels import select_backend
print(select_backend(torch.device("cpu"), prefer="torch").name)
print(select_backend(torch.device("cuda")).name)
"""


def test_without_triton_the_package_works_and_a_gpu_gets_torch_kernels() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["torch", "torch"]
    assert "kernels for cuda unavailable" in result.stderr


def test_the_cpp_sources_are_part_of_the_package() -> None:
    names = {path.name for path in files("tidemill_kernels").joinpath("native/src").iterdir()}
    assert {"attention.cc", "randomness.cc", "vector.h"} <= names


def test_triton_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA devices, not on cpu"):
        select_backend(torch.device("cpu"), prefer="triton")


def test_small_batches_are_split_and_large_ones_are_not() -> None:
    # 132 multiprocessors; tiles of 64 tokens.
    assert choose_num_splits(num_seqs=256, kv_heads=8, max_tiles=64, num_sms=132) == 1
    assert choose_num_splits(num_seqs=64, kv_heads=8, max_tiles=64, num_sms=132) == 2
    assert choose_num_splits(num_seqs=1, kv_heads=8, max_tiles=512, num_sms=132) == 32
    assert choose_num_splits(num_seqs=1, kv_heads=8, max_tiles=3, num_sms=132) == 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode_tiles_leave_room_for_several_programs_on_a_multiprocessor(head_dim: int) -> None:
    geometry = Geometry(group_size=8, head_dim=head_dim, element_size=2, block_size=16)
    shape = decode_shape(geometry)
    in_flight = 2 * shape.tile * geometry.row_bytes * (shape.num_stages - 1)
    assert in_flight <= 64 * 1024
