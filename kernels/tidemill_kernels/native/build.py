"""Compile the C++ kernels once per machine, compiler and source, safely among many processes."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"
_COMMON_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
# In order of preference; the later ones serve compilers that reject the earlier.
_FLAG_SETS = (
    ("-march=native", "-fopenmp"),
    ("-march=x86-64-v3", "-fopenmp"),
    ("-fopenmp",),
    ("-march=native",),
    (),
)
_COMPILE_TIMEOUT_SECONDS = 300


class NativeBuildError(RuntimeError):
    """The C++ kernels cannot be had on this machine; the message says why."""


def build_library(cache_dir: Path | None = None) -> Path:
    """Return the shared library of the native kernels, compiling it if it is not cached.

    Args:
        cache_dir: where libraries are kept; `default_cache_dir()` if None.

    Raises:
        NativeBuildError: there is no C++ compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    directory = cache_dir or default_cache_dir()
    library = directory / f"kernels-{_build_key(compiler)}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile_into(library, compiler)
    except OSError as error:
        raise NativeBuildError(f"cannot build native kernels in {directory}: {error}") from error
    return library


def find_compiler() -> str:
    """Return the path of a C++ compiler: `$CXX`, else c++, g++ or clang++ on the path.

    Raises:
        NativeBuildError: none is found.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise NativeBuildError("no C++ compiler found; install g++ or clang++, or set CXX")


def default_cache_dir() -> Path:
    """Return `tidemill/native` in the user's cache directory (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tidemill" / "native"


def _build_key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = _run([compiler, "--version"])
    for part in (compiler, version.stdout, repr(_COMMON_FLAGS + _FLAG_SETS), _cpu_flags()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    # A cache directory may be shared by machines with different instruction sets.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile_into(library: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        failures = []
        for flags in _FLAG_SETS:
            result = _compile(compiler, flags, output)
            if result.returncode == 0:
                # Atomic: another process sees the whole library or none.
                output.replace(library)
                return
            failures.append(f"{' '.join(flags)}: {result.stderr.strip()[-500:]}")
    raise NativeBuildError(f"{compiler} cannot compile the native kernels: {'; '.join(failures)}")


def _compile(
    compiler: str, flags: tuple[str, ...], output: Path
) -> subprocess.CompletedProcess[str]:
    sources = [str(path) for path in sorted(_SOURCES.glob("*.cc"))]
    return _run([compiler, *_COMMON_FLAGS, *flags, *sources, "-o", str(output)])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} did not finish in {error.timeout} s") from error
