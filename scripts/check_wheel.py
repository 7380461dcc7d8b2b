"""Build the wheel, install it into an empty venv, and run the demo from there."""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Return the demo's exit status."""
    with tempfile.TemporaryDirectory(prefix="tidemill-wheel-") as scratch:
        directory = Path(scratch)
        wheel = _build(directory / "dist")
        python = _install(wheel, directory / "venv")
        # Outside the repository, so that only what the wheel holds can be imported.
        outside = directory / "elsewhere"
        outside.mkdir()
        _say("running tidemill demo from the wheel")
        command = [python.with_name("tidemill"), "demo", "--max-tokens", "32", *sys.argv[1:]]
        return subprocess.run(command, cwd=outside, check=False).returncode


def _build(out: Path) -> Path:
    _say("building the wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(ROOT))
    [wheel] = out.glob("tidemill-*.whl")
    return wheel


def _install(wheel: Path, target: Path) -> Path:
    _say("installing it into an empty venv")
    venv.create(target, with_pip=True)
    python = target / "bin" / "python"
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    _run(*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[all]")
    return python


def _run(*command: str) -> None:
    # An editable install must not leak into the check.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def _say(what: str) -> None:
    print(f"wheel check: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
