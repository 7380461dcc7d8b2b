"""Building the C++ kernels: once, atomically, with fallbacks."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.attention_cases import TOLERANCES, Shape, make_problem, relative_error
from tidemill_kernels import select_backend
from tidemill_kernels.native.build import NativeBuildError, build_library, find_compiler

CPU = torch.device("cpu")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that logs every compilation to calls.log and obeys refuse.txt.

    It does not optimise, which takes most of the time and changes nothing that is tested here.
    """
    script = tmp_path / "logged-c++"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-shared*) echo "$*" >> {tmp_path}/calls.log;; esac\n'
        f"for flag in $(cat {tmp_path}/refuse.txt 2>/dev/null); do\n"
        '  case " $* " in *" $flag "*) echo "bad flag $flag" >&2; exit 1;; esac\n'
        "done\n"
        f'exec {find_compiler()} "$@" -O0\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def compilations(compiler: Path) -> list[str]:
    log = compiler.parent / "calls.log"
    return log.read_text().splitlines() if log.exists() else []


def test_the_library_is_compiled_once_and_then_found(compiler: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache")
    assert build_library(tmp_path / "cache") == first
    assert first.is_relative_to(tmp_path / "cache")
    assert len(compilations(compiler)) == 1


def test_processes_that_start_together_compile_once(compiler: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tidemill_kernels.native.build import "
        "build_library; print(build_library(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {child.communicate(timeout=120)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(paths) == 1
    assert len(compilations(compiler)) == 1


def test_a_compiler_without_march_native_still_gives_right_kernels(
    compiler: Path, tmp_path: Path
) -> None:
    (tmp_path / "refuse.txt").write_text("-march=native")
    backend = select_backend(CPU, prefer="native", native_cache_dir=tmp_path / "cache")
    problem = make_problem(Shape(9, 3), [1, 1, 33], [37, 600, 40])
    out = problem.poisoned_out()
    backend.paged_attention(
        out, problem.query, problem.key_cache, problem.value_cache, problem.metadata, problem.scale
    )
    assert "-march=x86-64-v3" in compilations(compiler)[-1]
    assert relative_error(out, problem.expected()) <= TOLERANCES[torch.float32]


def test_a_failing_compiler_is_an_error_that_quotes_it(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "refuse.txt").write_text("-shared")
    with pytest.raises(NativeBuildError, match=r"cannot compile.*bad flag -shared"):
        build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_a_compiler_the_cpu_gets_torch_kernels_and_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        backend = select_backend(CPU, native_cache_dir=tmp_path / "cache")
    assert backend.name == "torch"
    assert "no C++ compiler found" in caplog.text


def test_asking_for_native_kernels_without_a_compiler_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler found"):
        select_backend(CPU, prefer="native", native_cache_dir=tmp_path / "cache")


def test_the_cpu_gets_the_native_kernels() -> None:
    backend = select_backend(CPU)
    assert backend.name == "native"
    assert backend.supports_block_size(4)


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel backend 'cuda'.*'native'"):
        select_backend(CPU, prefer="cuda")
