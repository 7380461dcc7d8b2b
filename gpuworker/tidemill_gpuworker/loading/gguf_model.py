"""A GGUF file as a Hugging Face directory in the user's cache, converted once."""

import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from tidemill.protocol.errors import DamagedModel
from tidemill_gpuworker.demo.demo_progress import ProgressReport
from tidemill_gpuworker.loading.gguf_conversion import convert
from tidemill_gpuworker.loading.model_cache import lock, writable

_MAGIC = b"GGUF"
#: Raised whenever the conversion's outcome changes, so that old directories are made anew.
_FORMAT = 1


def gguf_model_dir(gguf: Path, cache_dir: Path, report: ProgressReport) -> Path:
    """Return the directory that ``gguf`` was converted to, converting it first if need be.

    A file counts as another one once its place, size or time of change differ.  Of several
    processes at once one converts and the others wait.

    Raises:
        DamagedModel: it is not a GGUF file.
        ModelError: it cannot be converted.
        ConfigError: the cache cannot be written.
    """
    _check_magic(gguf)
    target = cache_dir / "models" / f"{gguf.stem}-{_fingerprint(gguf)}"
    if _is_complete(target):
        return target
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


def _check_magic(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise DamagedModel(
            f"{gguf} cannot be read: {error.strerror}", fix="Check its permissions."
        ) from error
    if magic != _MAGIC:
        raise DamagedModel(f"{gguf} is not a GGUF file", fix="Download it again.")
