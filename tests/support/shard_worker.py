"""A worker process of any shard with the fake model.

Usage: ``python -m support.shard_worker URL SECONDS_PER_STEP SHARD``.
"""

import sys

from support.fake_worker import SlowRunner
from support.worker_rig import FAST, Rig
from tidemill.service.redis import connect
from tidemill.service.runtime import Drain


def main(url: str, step_seconds: str, shard: str) -> int:
    """Serve until drained; prints the worker's id once it takes jobs."""
    runner = SlowRunner(float(step_seconds))
    runner.run_free()
    config: dict[str, object] = {
        # It waits for a reply for a third of that, on a machine that runs all the servers as well.
        "lease_seconds": 3.0,
        "beat_seconds": 0.2,
        "policy": FAST,
        "shard": shard,
    }
    with connect(url, shard=shard) as client, Drain() as drain:
        rig = Rig(client, url, epoch=0, runner=runner, config=config)
        done = rig.process.run(drain, on_ready=lambda: print(rig.worker_id, flush=True))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
