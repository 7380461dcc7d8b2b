"""GGUF files that are cut off or hold something else are refused before anything reads them."""

import struct
from pathlib import Path

import pytest
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, Keys

from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import make_tiny_model
from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.loading.gguf_contents import BLOCKS, check_contents

_NAME = struct.pack("<Q", 1) + b"a"
#: Arrays of one array each.
_NESTED = struct.pack("<IQ", 9, 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_tiny_gguf(make_tiny_model("llama-tied"), path)
    return path.read_bytes()


def test_the_blocks_are_those_of_the_reference() -> None:
    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert theirs.items() <= BLOCKS.items()


def test_a_whole_file_is_accepted_and_one_whose_end_is_missing_is_not(
    whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    check_contents(path)

    path.write_bytes(whole[:-64])
    with pytest.raises(DamagedModel, match=r"x\.gguf holds less .*tensor .* ends at byte"):
        check_contents(path)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_file_that_is_cut_off_names_what_is_missing(
    whole: bytes, tmp_path: Path, share: float
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DamagedModel, match="holds less than it announces: "):
        check_contents(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (struct.pack("<QQ", 0, 1) + b"\xff" * 64, "ends within field 1 of 1"),
        (struct.pack("<QQ", 0, 1) + _NAME + struct.pack("<I", 77), "unknown type 77"),
        (struct.pack("<QQ", 0, 1) + _NAME + struct.pack("<I", 9) + _NESTED * 9, "unknown type 9"),
        (struct.pack("<QQ", 0, 2) + _NAME + struct.pack("<IIQ", 9, 4, 2**62), "within field 1"),
        (struct.pack("<QQ", 1, 0) + _NAME + struct.pack("<I", 2**31), "dimensions"),
        (
            struct.pack("<QQ", 1, 0) + _NAME + struct.pack("<IQQIQ", 2, 2**63, 4, 0, 0),
            "tensor a ends",
        ),
        (struct.pack("<QQ", 1, 0) + _NAME + struct.pack("<IQIQ", 1, 4, 0, 2**40), "tensor a ends"),
    ],
)
def test_contents_that_are_no_gguf_are_told(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    with pytest.raises(DamagedModel, match=reason):
        check_contents(path)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_a_part_of_a_split_model_is_told_from_a_whole_one(tmp_path: Path, num_parts: int) -> None:
    path = tmp_path / "x-00001-of-00003.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint16(Keys.Split.LLM_KV_SPLIT_COUNT, num_parts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if num_parts < 2:
        check_contents(path)
    else:
        with pytest.raises(UnsupportedModel, match="one of 3 parts of a model"):
            check_contents(path)
