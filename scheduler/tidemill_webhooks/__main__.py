"""``python -m tidemill_webhooks``: a worker of the queue of webhooks."""

import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tidemill.protocol.errors import ConfigError, TidemillError
from tidemill.protocol.ids import new_ulid
from tidemill.service.config import load_config
from tidemill.service.log import setup_logging
from tidemill.service.metrics import MetricsServer
from tidemill.service.redis import connect, translate
from tidemill.service.runtime import exit_with_parent
from tidemill_webhooks.config import WorkerConfig, worker_config
from tidemill_webhooks.rq_jobs import make_worker
from tidemill_webhooks.rq_worker import Presence, Runtime, use_runtime

_log = logging.getLogger("tidemill_webhooks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until SIGTERM; returns the exit status: 1 an error that may pass, 2 one that lasts."""
    exit_with_parent()
    # Until RQ listens to it: who said that it is there must say goodbye.
    signal.signal(signal.SIGTERM, _leave)
    try:
        service = load_config()
        setup_logging(service.log_level, "webhooks")
        serve(worker_config(sys.argv[1:] if arguments is None else arguments, service))
    except TidemillError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(0)


def serve(config: WorkerConfig, *, burst: bool = False) -> None:
    """Work off the queue, with ``burst`` until it is empty; raises ``BrokerError``."""
    worker_id = f"whk_{new_ulid()}"
    with contextlib.ExitStack() as stack:
        if config.metrics_port is not None:
            server = stack.enter_context(
                MetricsServer(config.metrics_port, health=lambda: (True, {"worker": worker_id}))
            )
            _log.info("metrics on port %d", server.port)
        client = stack.enter_context(connect(config.rq_url, client_name=worker_id))
        runtime = Runtime(config)
        stack.callback(runtime.close)
        stack.callback(use_runtime, None)
        use_runtime(runtime)
        with translate():
            worker = make_worker(client, worker_id)
            with Presence(config.redis_url, config.shards, worker_id):
                _log.info("%s is ready", worker_id)
                worker.work(burst=burst)


if __name__ == "__main__":
    sys.exit(main())
