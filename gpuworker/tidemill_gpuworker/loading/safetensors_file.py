"""A safetensors file: its header, checked, and its tensors, copied out of a memory map.

The format is 8 bytes with the length of the header, a JSON header that names each tensor's dtype,
shape and byte range, then the bytes (README of https://github.com/huggingface/safetensors).
"""

import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from tidemill.protocol.errors import DamagedModel, UnsupportedModel

# The limit of the reference implementation: a length field must not make us read gigabytes.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_BLOCK_ROWS = 4096
#: Plain floats: what unquantised weights are stored as.
FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# What quantised weights are made of beside those.
_STORED_DTYPES = FLOAT_DTYPES | {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header says of a tensor; ``start`` and ``end`` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file; it stays mapped as long as the object lives.

    Raises:
        DamagedModel: the file is missing, truncated, or its header contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise _damaged(path, "the file is missing")
        try:
            self._open(path)
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {error.strerror or error}") from error
        self.entries = _parse_header(self.header, len(self._map), path)

    def enter(self, prefix: str) -> None:
        """Know the tensors alone whose names begin with ``prefix``, and call them without it."""
        self.entries = {
            name.removeprefix(prefix): entry
            for name, entry in self.entries.items()
            if name.startswith(prefix)
        }

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor of the same shape into ``target``, converting to its dtype.

        Raises:
            UnsupportedModel: the tensor is stored in a dtype other than the plain float ones.
        """
        entry = self._plain(name)
        if target.numel():
            target.copy_(self._mapped(entry))
            self._forget(entry)

    def copy_part_into(self, name: str, target: torch.Tensor, dim: int, start: int) -> None:
        """Copy what ``target`` has room for from ``start`` along ``dim``; raises as above."""
        entry = self._plain(name)
        if target.numel():
            target.copy_(self._mapped(entry).narrow(dim, start, target.shape[dim]))
            self._forget(entry)

    def blocks(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield a tensor in ``dtype``, some rows at a time, not to be kept; raises as above."""
        entry = self._plain(name)
        if math.prod(entry.shape):
            for rows in torch.split(self._mapped(entry), _BLOCK_ROWS):
                yield rows.to(dtype)
            self._forget(entry)

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of a tensor as it is stored.

        Raises:
            UnsupportedModel: its dtype is not known.
        """
        entry = self.entries[name]
        if entry.dtype not in _STORED_DTYPES:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is stored as {entry.dtype}",
                fix=f"Use weights in one of {', '.join(_STORED_DTYPES)}.",
            )
        dtype = _STORED_DTYPES[entry.dtype]
        copied = torch.empty(entry.shape, dtype=dtype)
        if copied.numel():
            # The bytes may start anywhere in the file, the copy is aligned.
            raw = torch.frombuffer(
                self._map, dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start
            )
            copied.view(-1).view(torch.uint8).copy_(raw)
            self._forget(entry)
        return copied

    def sample(self, name: str, num_bytes: int) -> bytes:
        """Return the first bytes of a tensor, at most ``num_bytes``."""
        entry = self.entries[name]
        return self._map[entry.start : min(entry.end, entry.start + num_bytes)]

    def _plain(self, name: str) -> TensorEntry:
        entry = self.entries[name]
        if entry.dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is stored as {entry.dtype}",
                fix=f"Use weights in one of {', '.join(FLOAT_DTYPES)}.",
            )
        return entry

    def _open(self, path: Path) -> None:
        with path.open("rb") as file:
            self.header = _read_header(file.read, path.stat().st_size, path)
            # Private and writable, because torch warns about memory that it must not write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _mapped(self, entry: TensorEntry) -> torch.Tensor:
        dtype, count = FLOAT_DTYPES[entry.dtype], math.prod(entry.shape)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)

    def _forget(self, entry: TensorEntry) -> None:
        # Mapped pages count as resident memory, so that without this a load peaks at the size of
        # the file on top of the copies.
        start = entry.start - entry.start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)


def _read_header(read: Callable[[int], bytes], size: int, path: Path) -> bytes:
    if size < _LENGTH_BYTES:
        raise _damaged(path, f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(read(_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    if length > size - _LENGTH_BYTES:
        raise _damaged(path, f"truncated: the header takes {length} bytes, the file has {size}")
    return read(length)


def _parse_header(raw: bytes, size: int, path: Path) -> dict[str, TensorEntry]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + len(raw)
    entries = {
        name: _parse_entry(name, fields, data_start, path) for name, fields in header.items()
    }
    _check_ranges(entries, data_start, size, path)
    return entries


def _parse_entry(name: str, fields: object, data_start: int, path: Path) -> TensorEntry:
    if not isinstance(fields, Mapping):
        raise _damaged(path, f"tensor {name}: its header entry is not an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise _damaged(path, f"tensor {name}: its header entry lacks a valid shape or data_offsets")
    start, end = offsets
    known = _STORED_DTYPES.get(str(dtype))
    expected = math.prod(shape) * known.itemsize if known else end - start
    if end - start != expected:
        raise _damaged(
            path, f"tensor {name}: {dtype} {shape} takes {expected} bytes, not {end - start}"
        )
    return TensorEntry(str(dtype), tuple(shape), data_start + start, data_start + end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_ranges(
    entries: Mapping[str, TensorEntry], data_start: int, size: int, path: Path
) -> None:
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > size:
            raise _damaged(
                path, f"truncated: tensor {name} ends at byte {entry.end}, the file at {size}"
            )
        if entry.start != position:
            raise _damaged(path, f"tensor {name} starts at byte {entry.start}, not at {position}")
        position = entry.end
    if position != size:
        raise _damaged(path, f"the tensors end at byte {position}, the file at {size}")


def _damaged(path: Path, reason: str) -> DamagedModel:
    return DamagedModel(f"{path}: {reason}", fix="Download the file again.")
