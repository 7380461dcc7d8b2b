"""A GGUF file as a Hugging Face directory in the user's cache, converted once."""

import shutil
import struct
import tempfile
from hashlib import sha256
from pathlib import Path

from tidemill.protocol.errors import DamagedModel
from tidemill_gpuworker.demo.demo_progress import ProgressReport
from tidemill_gpuworker.loading.gguf_contents import check_contents
from tidemill_gpuworker.loading.gguf_conversion import convert
from tidemill_gpuworker.loading.model_cache import lock, writable

_MAGIC = b"GGUF"
#: Behind the magic: version, number of tensors, number of fields; and the least bytes of each.
_COUNTS = struct.Struct("<IQQ")
_VERSIONS = (2, 3)
_TENSOR_BYTES, _FIELD_BYTES = 24, 13
#: Raised whenever the conversion's outcome changes, so that old directories are made anew.
_FORMAT = 3


def gguf_model_dir(gguf: Path, cache_dir: Path, report: ProgressReport) -> Path:
    """Return the directory that ``gguf`` was converted to, converting it first if need be.

    A file counts as another one once its place, size or time of change differ.  Of several
    processes at once one converts and the others wait.

    Raises:
        DamagedModel: it is not a GGUF file, or holds less than it announces.
        ModelError: it cannot be converted.
        ConfigError: the cache cannot be written.
    """
    _check_header(gguf)
    target = cache_dir / "models" / f"{gguf.stem}-{_fingerprint(gguf)}"
    if _is_complete(target):
        return target
    check_contents(gguf)
    waiting = f"Waiting for another process that converts {gguf.name}"
    with writable(cache_dir), lock(target.with_name(f"{target.name}.lock"), report, waiting):
        if not _is_complete(target):
            report.phase(f"Converting {gguf.name} to safetensors (once)")
            _make(gguf, target)
    return target


def _make(gguf: Path, target: Path) -> None:
    prefix = f"{target.name}."
    # Whoever made these is dead, or would hold the lock.
    for abandoned in target.parent.glob(f"{prefix}*/"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        convert(gguf.resolve(), made)
        # Only what is whole gets this name.
        made.rename(target)


def _is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _fingerprint(gguf: Path) -> str:
    status = gguf.stat()
    facts = f"{_FORMAT} {gguf.resolve()} {status.st_size} {status.st_mtime_ns}"
    return sha256(facts.encode()).hexdigest()[:16]


def _check_header(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic, counts = file.read(len(_MAGIC)), file.read(_COUNTS.size)
            size = gguf.stat().st_size
    except OSError as error:
        raise DamagedModel(
            f"{gguf} cannot be read: {error.strerror}", fix="Check its permissions."
        ) from error
    if magic != _MAGIC:
        raise DamagedModel(f"{gguf} is not a GGUF file", fix="Download it again.")
    _check_counts(gguf, counts, size)


def _check_counts(gguf: Path, counts: bytes, size: int) -> None:
    """Refuse what could not hold as much as it announces, which would be read for hours."""
    if len(counts) < _COUNTS.size:
        raise DamagedModel(f"{gguf} ends within its header", fix="Download it again.")
    version, num_tensors, num_fields = _COUNTS.unpack(counts)
    if version not in _VERSIONS:
        raise DamagedModel(
            f"{gguf} has version {version} of GGUF, or its bytes in big-endian order",
            fix="Convert it anew with today's llama.cpp, which writes version 3.",
        )
    header = len(_MAGIC) + _COUNTS.size
    if header + num_tensors * _TENSOR_BYTES + num_fields * _FIELD_BYTES > size:
        raise DamagedModel(
            f"{gguf} announces {num_tensors:,} tensors and {num_fields:,} fields, which {size:,}"
            " bytes cannot hold",
            fix="Download it again.",
        )
