"""What a GGUF file says that it holds, against how long it is.

Behind the magic and the counts come the fields (a name, a type, a value), then the tensors' names,
sizes, types and offsets, then, aligned, their bytes.  Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from tidemill.protocol.errors import DamagedModel, UnsupportedModel

#: Magic, version, number of tensors, number of fields.
_HEADER = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
#: Bytes of a value by its type.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
#: Arrays of arrays are no deeper than this.
_MAX_DEPTH = 4
_MAX_DIMENSIONS = 8
_ALIGNMENT_FIELD, _DEFAULT_ALIGNMENT = b"general.alignment", 32
#: How many files the model is split into.
_SPLIT_FIELD = b"split.count"
_U16 = struct.Struct("<H")
#: Weights and bytes of a block by the type of a tensor, as ggml has them.
BLOCKS: dict[int, tuple[int, int]] = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 40),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    offset: int
    num_bytes: int


def check_contents(gguf: Path) -> None:
    """Check a file with a valid header.

    Raises:
        DamagedModel: it is cut off, or holds what is not GGUF.
        UnsupportedModel: it is a part of a split model.
    """
    try:
        with (
            gguf.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            _Reader(gguf, data).check()
    except OSError as error:
        raise DamagedModel(
            f"{gguf} cannot be read: {error.strerror}", fix="Check its permissions."
        ) from error


class _Reader:
    """Walks over a file; takes no more memory than the list of its tensors."""

    def __init__(self, gguf: Path, data: mmap.mmap) -> None:
        self._gguf = gguf
        self._data = data
        self._at = 0
        self._alignment = _DEFAULT_ALIGNMENT

    def check(self) -> None:
        _, _, num_tensors, num_fields = self._unpack(_HEADER, "header")
        for index in range(num_fields):
            self._pass_field(f"field {index + 1} of {num_fields}")
        tensors = [self._tensor(f"tensor {n + 1} of {num_tensors}") for n in range(num_tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        for tensor in tensors:
            end = start + tensor.offset + tensor.num_bytes
            if end > len(self._data):
                raise self._damaged(
                    f"holds less than it announces: tensor {tensor.name} ends at byte {end:,},"
                    f" the file at {len(self._data):,}"
                )

    def _pass_field(self, what: str) -> None:
        name = self._string(what)
        kind = self._number(_U32, what)
        if name == _ALIGNMENT_FIELD and kind == 4:
            self._alignment = self._number(_U32, what) or _DEFAULT_ALIGNMENT
        elif name == _SPLIT_FIELD and kind == 2:
            self._check_split(self._number(_U16, what))
        else:
            self._pass_value(kind, 1, what)

    def _check_split(self, num_parts: int) -> None:
        if num_parts > 1:
            raise UnsupportedModel(
                f"{self._gguf} is one of {num_parts} parts of a model",
                fix="Join them with llama-gguf-split --merge, and give the file that it writes.",
            )

    def _pass_value(self, kind: int, count: int, what: str, depth: int = 0) -> None:
        if kind in _VALUE_BYTES:
            self._skip(count * _VALUE_BYTES[kind], what)
        elif kind == _STRING:
            for _ in range(count):
                self._skip(self._number(_U64, what), what)
        elif kind == _ARRAY and depth < _MAX_DEPTH:
            for _ in range(count):
                inner = self._number(_U32, what)
                self._pass_value(inner, self._number(_U64, what), what, depth + 1)
        else:
            raise self._damaged(f"is no valid GGUF: {what} has a value of unknown type {kind}")

    def _tensor(self, what: str) -> _Tensor:
        name = self._string(what).decode(errors="replace")
        num_dimensions = self._number(_U32, what)
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._damaged(f"is no valid GGUF: {what} has {num_dimensions} dimensions")
        size = math.prod(self._number(_U64, what) for _ in range(num_dimensions))
        # A type of tomorrow is left to the conversion.
        weights, num_bytes = BLOCKS.get(self._number(_U32, what), (1, 0))
        return _Tensor(name, self._number(_U64, what), -(-size // weights) * num_bytes)

    def _string(self, what: str) -> bytes:
        length = self._number(_U64, what)
        start = self._at
        self._skip(length, what)
        return self._data[start : self._at]

    def _number(self, kind: struct.Struct, what: str) -> int:
        return int(self._unpack(kind, what)[0])

    def _unpack(self, kind: struct.Struct, what: str) -> tuple[int, ...]:
        start = self._at
        self._skip(kind.size, what)
        return kind.unpack_from(self._data, start)

    def _skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > len(self._data) - self._at:
            raise self._damaged(
                f"holds less than it announces: it ends within {what}, at byte {len(self._data):,}"
            )
        self._at += num_bytes

    def _damaged(self, reason: str) -> DamagedModel:
        return DamagedModel(f"{self._gguf} {reason}", fix="Download it again.")
