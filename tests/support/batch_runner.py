"""A batch runner as a process of a test: short leases, small parts."""

import os

from tidemill.batches import validation
from tidemill_scheduler.batches.__main__ import main as run

PART_LINES = 16


def main(url: str, blob_url: str) -> int:
    """Run until killed or idle."""
    os.environ["TIDEMILL_REDIS_URL"] = url
    os.environ["TIDEMILL_SHARD"] = "00"
    os.environ["TIDEMILL_BLOB_URL"] = blob_url
    validation.PART_LINES = PART_LINES
    return run(["--lease-seconds", "0.4"])
