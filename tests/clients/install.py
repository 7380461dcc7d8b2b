"""Install the clients that the tests of this folder run: ``python tests/clients/install.py``.

Each group of clients has a virtual environment of its own below ``.venv-clients``, because they pin
each other's dependencies apart. ``requirements/GROUP.txt`` is what ``pip freeze`` told of it, so
nothing is resolved; the clients of Node are those of ``node/package.json``. What is installed
already is left alone. Arguments are groups; without any it is all of them.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
VENVS = FOLDER.parents[1] / ".venv-clients"
REQUIREMENTS = FOLDER / "requirements"
NODE = "node"
NODE_FOLDER = FOLDER / NODE


def python_of(group: str) -> Path:
    """Return the interpreter of a group, which need not be there."""
    return VENVS / group / "bin" / "python"


def groups() -> list[str]:
    """Return all groups that can be installed."""
    found = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
    return [*found, NODE] if (NODE_FOLDER / "package.json").is_file() else found


def missing(group: str) -> str | None:
    """Return why the programs of a group cannot run, or None if they can."""
    wanted, stamp = _wanted(group), _stamp(group)
    if not wanted.is_file():
        return f"there is no {wanted.relative_to(FOLDER)}"
    if not stamp.is_file() or stamp.read_text() != _digest(wanted):
        return f"{group} is not installed; `make clients` installs it"
    return None


def install(group: str) -> None:
    """Make the environment of a group; raises ``CalledProcessError`` where that fails."""
    if group == NODE:
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
        subprocess.run([*command, "--loglevel=error"], cwd=NODE_FOLDER, check=True)
    else:
        _install_python(group)
    _stamp(group).write_text(_digest(_wanted(group)))


def _install_python(group: str) -> None:
    python = python_of(group)
    shutil.rmtree(VENVS / group, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENVS / group)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # Some clients ask for versions that others of their group do not allow, and work all the same.
    subprocess.run([*pip, "--no-deps", "-r", str(_wanted(group))], check=True)


def _wanted(group: str) -> Path:
    return NODE_FOLDER / "package.json" if group == NODE else REQUIREMENTS / f"{group}.txt"


def _stamp(group: str) -> Path:
    folder = NODE_FOLDER / "node_modules" if group == NODE else VENVS / group
    return folder / ".installed"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(asked: Sequence[str]) -> int:
    """Install the groups that are asked for; returns the exit status."""
    unknown = set(asked) - set(groups())
    if unknown:
        print(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(groups())}")
        return 2
    failed = []
    for group in asked or groups():
        if missing(group) is None:
            continue
        print(f"Installing the clients of {group} ...", flush=True)
        try:
            install(group)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"error: {group} cannot be installed: {error}")
            failed.append(group)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
