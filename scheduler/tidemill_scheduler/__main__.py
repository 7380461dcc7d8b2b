"""``python -m tidemill_scheduler``: the scheduler daemon of one shard."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence

from tidemill.protocol.errors import ConfigError, TidemillError
from tidemill.service.config import load_config
from tidemill.service.log import setup_logging
from tidemill.service.metrics import MetricsServer
from tidemill.service.runtime import Drain, exit_with_parent
from tidemill_scheduler.config import parse_arguments
from tidemill_scheduler.daemon import Daemon
from tidemill_scheduler.health import Health

_log = logging.getLogger("tidemill_scheduler")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; returns the exit status: 0 drained, 2 wrong settings, 1 other errors."""
    exit_with_parent()
    try:
        _run(arguments)
    except TidemillError as error:
        print(f"tidemill-scheduler: {error.one_line()}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


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
