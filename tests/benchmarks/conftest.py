"""Lets tests import the parts of benchmarks that decide something."""

import sys
from pathlib import Path

# Behind everything else: benchmarks have modules of common names.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
