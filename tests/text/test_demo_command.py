"""The command that prepares the demo model, and its caller: interrupted, and failing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import heed_interrupts
from support.wait import wait_until
from tidemill.cli.model import find_model
from tidemill.protocol.errors import ModelNotFound

# The real command, except that its child (conversion or pip) writes a part and then takes forever.
_COMMAND = """
import sys
from pathlib import Path
from tidemill_gpuworker.demo import demo_model
from tidemill_gpuworker.demo import demo_wheel
kind, child, *arguments = sys.argv[1:]
demo_wheel.find_installed_gguf = lambda: Path("a.gguf") if kind == "conversion" else None
demo_wheel.check_gguf = lambda path: None
sys.executable = child
sys.exit(demo_model.main(arguments))
"""
_CALLER = """
import sys
from pathlib import Path
from tidemill.cli.model import find_model
sys.executable = sys.argv[1]
try:
    find_model(None, Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""
_PART = {"conversion": '"$4/part"', "download": '"$TMPDIR/part"'}
_PATTERN = {"conversion": "models/*/*/part", "download": "wheels/*/part"}


def write_script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o700)
    return path


def start_caller(directory: Path, kind: str) -> "subprocess.Popen[str]":
    """Start the caller in a process group of its own; returns once its grandchild has written."""
    child = write_script(
        directory / "child", "trap '' INT", f"echo half > {_PART[kind]}", "exec sleep 60"
    )
    (directory / "command.py").write_text(_COMMAND)
    (directory / "caller.py").write_text(_CALLER)
    python = write_script(
        directory / "python",
        "shift 2",  # -m tidemill_gpuworker.demo.demo_model
        f'exec {sys.executable} {directory}/command.py {kind} {child} "$@"',
    )
    caller = subprocess.Popen(
        [sys.executable, str(directory / "caller.py"), str(python), str(directory / "cache")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    wait_until(
        lambda: list((directory / "cache").glob(_PATTERN[kind])), timeout=60, what="a part is there"
    )
    return caller


@pytest.mark.parametrize("kind", ["conversion", "download"])
def test_an_interrupt_leaves_nothing_half_made(tmp_path: Path, kind: str) -> None:
    caller = start_caller(tmp_path, kind)
    caller.send_signal(signal.SIGINT)
    output, complaint = caller.communicate(timeout=60)
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]
    assert left in ([], ["models"], ["models", "wheels"], ["wheels", "models"])
    assert caller.returncode == 130
    assert "Traceback" not in output + complaint


@pytest.mark.parametrize("is_quiet", [True, False])
def test_the_caller_alone_tells_what_failed(
    is_quiet: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound) as caught:
        find_model(None, tmp_path / "file", quiet=is_quiet)
    line = caught.value.one_line()
    assert f"the cache directory {tmp_path / 'file'} cannot be used" in line
    assert "TIDEMILL_CACHE_DIR" in line
    assert "error:" not in line + "".join(capfd.readouterr())


def test_a_preparation_that_crashes_is_told_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing = write_script(tmp_path / "python", "exit 7")
    monkeypatch.setattr(sys, "executable", str(crashing))
    with pytest.raises(ModelNotFound, match="status 7"):
        find_model(None, tmp_path)
