"""``python -m tidemill_scheduler``: the scheduler daemon of one shard."""

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Sequence

from tidemill.protocol.errors import TidemillError
from tidemill.service.config import load_config
from tidemill.service.log import setup_logging
from tidemill.service.metrics import MetricsServer
from tidemill.service.runtime import Drain, exit_with_parent
from tidemill_scheduler.config import parse_arguments
from tidemill_scheduler.daemon import Daemon, is_lasting
from tidemill_scheduler.health import Health

_log = logging.getLogger("tidemill_scheduler")


#: Collections of the garbage collector, see ``gc.set_threshold``.  Waiting jobs make no cycles, and
#: looking through a million of them takes a second; the oldest generation is hardly ever due.
GC_THRESHOLDS = (50_000, 20, 1_000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; returns the exit status.

    0 drained, 1 an error that may pass, 2 what another start cannot cure.
    """
    exit_with_parent()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        _run(arguments)
    except TidemillError as error:
        return _refuse(error.one_line(), 2 if is_lasting(error) else 1)
    except Exception as error:
        _log.exception("the scheduler ends")
        return _refuse(f"unexpected {type(error).__name__}; see the log above", 1)
    return 0


def _refuse(reason: str, status: int) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return status


def _run(arguments: Sequence[str] | None) -> None:
    service = load_config()
    config = parse_arguments(arguments, service)
    setup_logging(service.log_level, "scheduler")
    health = Health()
    with contextlib.ExitStack() as stack:
        drain = stack.enter_context(Drain())
        if config.metrics_port is not None:
            server = MetricsServer(config.metrics_port, health=health.check)
            _log.info("metrics on port %d", stack.enter_context(server).port)
        asyncio.run(Daemon(config, service.cache_dir, health).run(drain.draining))


if __name__ == "__main__":
    sys.exit(main())
