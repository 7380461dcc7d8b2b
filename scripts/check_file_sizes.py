"""Fail when a source file has outgrown its idea: more than 500 lines."""

import subprocess
import sys
from pathlib import Path

LIMIT_LINES = 500
SUFFIXES = {".py", ".lua", ".cpp"}


def main() -> int:
    """Print each tracked file over the limit; the exit status tells whether there is one."""
    listing = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    files = [Path(name) for name in listing.stdout.split("\n") if Path(name).suffix in SUFFIXES]
    too_long = [(path, n) for path in files if (n := _num_lines(path)) > LIMIT_LINES]
    for path, count in too_long:
        print(f"{path}: {count} lines, the limit is {LIMIT_LINES}; split it")
    return 1 if too_long else 0


def _num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines()) if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
